"""Tokenizers of Hugging Face folders: as transformers reads the same files, but without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from levserve.errors import StartupError
from levserve.text.tokenizer import load_tokenizer
from tests.conftest import FAMILIES, GOLDEN

TEXTS = [
    "",
    "t17  t18",
    "word <s> Word</s>word",
    "<a> <A> word<b>  word <c> <d>",
    "<pad><unk> <|im_end|>\n",
    "é 東京 🎉",
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
FOLDERS = [*FAMILIES, "levanter-llama/tokenizer"]


def save_folder(path: Path, **files: Any) -> Path:
    """Saves a tokenizer of words with the added tokens <s> and <a>, and further JSON files about it."""
    words = ["<s>", "</s>", "<unk>", "<pad>", "<b>", "word"]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("<a>", lstrip=True)])
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def added(content: str, **fields: bool) -> dict[str, Any]:
    return {
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "special": False,
        **fields,
    }


def check_against_transformers(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours, theirs = (
        load_tokenizer(folder),
        PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True),
    )
    expected = theirs.backend_tokenizer
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (
        theirs.bos_token,
        theirs.eos_token,
        theirs.pad_token,
    )
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_ids == ({theirs.eos_token_id} if theirs.eos_token is not None else set())
    assert ours.vocab_size == len(theirs)
    assert set(ours.special_tokens) == {
        token.content for token in theirs.added_tokens_decoder.values() if token.special
    }
    for text in TEXTS:
        for adds in (True, False):
            assert (
                ours.encode(text, add_special_tokens=adds)
                == expected.encode(text, add_special_tokens=adds).ids
            )


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_folder_is_read_as_transformers_reads_it(name: str) -> None:
    check_against_transformers(GOLDEN / name)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": NAMES},
        {"tokenizer_config": {**NAMES, "add_bos_token": False, "add_eos_token": True, "pad_token": None}},
        {
            "tokenizer_config": {
                "eos_token": {"__type": "AddedToken", **added("</s>", rstrip=True)},
                "unk_token": "<unk>",
            }
        },
        {"tokenizer_config": {**NAMES, "chat_template": "{{ messages }}"}},
        # Tokens that the vocabulary lacks, out of order; tokens that it has, with other fields; a named one.
        {
            "tokenizer_config": {
                **NAMES,
                "added_tokens_decoder": {"8": added("<d>"), "7": added("<c>", rstrip=True, special=True)},
            }
        },
        {
            "tokenizer_config": {
                "added_tokens_decoder": {"6": added("<a>", normalized=False), "4": added("<b>", special=True)}
            }
        },
        {"tokenizer_config": {"pad_token": "<c>", "added_tokens_decoder": {"7": added("<c>")}}},
        {"tokenizer_config": {"additional_special_tokens": ["<b>", "<pad>"]}},
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<b>"}, "audio_token": "<a>"}},
        # Files of older versions, which count only where tokenizer_config.json lists no tokens.
        {"special_tokens_map": {"bos_token": "<s>", "eos_token": added("</s>"), "pad_token": "<b>"}},
        {"tokenizer_config": {"eos_token": "<s>"}, "special_tokens_map": {"eos_token": "</s>"}},
        {
            "tokenizer_config": {"eos_token": "<s>", "added_tokens_decoder": {}},
            "special_tokens_map": {"eos_token": "</s>"},
        },
        {"tokenizer_config": NAMES, "added_tokens": {"<d>": 8, "<c>": 7, "<a>": 6, "<s>": 0}},
        {"tokenizer_config": {**NAMES, "added_tokens_decoder": {}}, "added_tokens": {"<c>": 7}},
    ],
)
def test_configuration_is_read_as_transformers_reads_it(tmp_path: Path, files: dict[str, Any]) -> None:
    check_against_transformers(save_folder(tmp_path, **files))


def test_named_token_that_the_vocabulary_lacks_is_not_made(tmp_path: Path) -> None:
    """transformers adds such a token, but the model has no row for it."""
    config = {**NAMES, "pad_token": "[PAD]", "additional_special_tokens": ["<|more|>"]}
    loaded = load_tokenizer(save_folder(tmp_path, tokenizer_config=config))
    assert (loaded.bos_token, loaded.pad_token, loaded.vocab_size) == ("<s>", None, 7)
    assert max(loaded.encode("[PAD] <|more|>")) < 7


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ([], "tokenizer_config.json: not a JSON object"),
        ({"eos_token": 2}, "2 is not a token"),
        ({"eos_token": {"lstrip": True}}, "is not a token"),
        ({"added_tokens_decoder": {"7": {"content": None}}}, "is not a token"),
        ({"added_tokens_decoder": {"seven": added("<c>")}}, "'seven'"),
        ({"added_tokens_decoder": ["<c>"]}, "cannot read the tokenizer"),
    ],
)
def test_configuration_that_makes_no_sense_is_refused_in_one_line(
    tmp_path: Path, config: Any, told: str
) -> None:
    with pytest.raises(StartupError, match=told) as caught:
        load_tokenizer(save_folder(tmp_path, tokenizer_config=config))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_a_folder_with_neither_file_imports_transformers_which_says_nothing(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    (tmp_path / "vocab.json").write_text(
        json.dumps({text: token for token, text in enumerate([*letters, "ab", "<|endoftext|>"])})
    )
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 257}))
    program = (
        "import sys; from pathlib import Path; from levserve.text.tokenizer import load_tokenizer as load\n"
        f"assert load(Path({str(GOLDEN / 'llama')!r})).encode('t17') == [17] and 'transformers' not in sys.modules\n"
        f"loaded = load(Path({str(tmp_path)!r}))\n"
        "assert 'transformers' in sys.modules and (loaded.encode('ab'), loaded.eos_ids) == ([256], {257}), loaded.encode('ab')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_folder_without_a_tokenizer_is_told_of_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match="the folder has no tokenizer; give one from elsewhere") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
