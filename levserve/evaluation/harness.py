"""The model `levserve` of lm-evaluation-harness: its tasks on an engine in the same process, without HTTP.

Importing this module registers it:

    import levserve.evaluation.harness
    lm_eval.simple_evaluate(model="levserve", model_args={"pretrained": "smollm2-135m"}, tasks=["arc_easy"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from levserve.api.opening import open_model
from levserve.evaluation.evaluator import Evaluator
from levserve.text.chat import render_text, template_of


@register_model("levserve")
class LevserveLM(LM):
    """Created by the harness from `--model_args`: `pretrained`, what `Evaluator` takes, and settings by name.

    The engine makes its own batches, so `--batch_size` is not used; `max_running` says how many sequences run
    at a time.
    """

    def __init__(
        self,
        pretrained: str = "",
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **settings: object,
    ) -> None:
        super().__init__()
        # The harness passes "cuda:0" unless told otherwise; levserve finds the device itself.
        if device and not device.startswith("cuda"):
            settings["device"] = device
        self.model = open_model(pretrained, settings)
        self._chat_template_args = chat_template_args
        try:
            self._evaluator = Evaluator(
                self.model,
                max_gen_toks=max_gen_toks,
                prefix_token_id=prefix_token_id,
                add_bos_token=add_bos_token,
            )
        except BaseException:
            self.model.close()
            raise

    def loglikelihood(self, requests: Sequence[Any], **_: object) -> list[tuple[float, bool]]:
        return self._remember("loglikelihood", requests, self._evaluator.loglikelihood(_arguments(requests)))

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: object) -> list[float]:
        texts = [text for (text,) in _arguments(requests)]
        return self._remember("loglikelihood_rolling", requests, self._evaluator.loglikelihood_rolling(texts))

    def generate_until(self, requests: Sequence[Any], **_: object) -> list[str]:
        return self._remember(
            "generate_until", requests, self._evaluator.generate_until(_arguments(requests))
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return render_text(
            self.model.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            template_kwargs=self._chat_template_args,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return template_of(self.model.tokenizer) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return self.model.name.replace("/", "__")

    def close(self) -> None:
        self.model.close()

    def _remember(self, kind: str, requests: Sequence[Any], results: list[Any]) -> list[Any]:
        """Adds the results to the harness's cache, if one is in use."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(kind, request.args, result)
        return results


def _arguments(requests: Sequence[Any]) -> list[Any]:
    return [request.args for request in requests]
