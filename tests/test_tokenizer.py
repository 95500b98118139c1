"""Tokenizers: the golden cases, every kind of vocabulary, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from levserve.errors import BadRequest, StartupError
from levserve.text.tokenizer import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "smollm2-135m.json").read_text(encoding="utf-8"))["cases"]
FOLDERS = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3")
# SmolLM2's vocabulary has no token for some control characters and for the bytes that begin characters above U+3FFFF.
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs"), max_codepoint=0x3FFFF))


@pytest.fixture(scope="module")
def tokenizer(bundled_gguf: Path) -> Tokenizer:
    return load_tokenizer(bundled_gguf)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["user"][:24])
def test_golden_case_encodes_and_decodes_as_the_reference(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["prompt"]) == case["prompt_tokens"]
    assert tokenizer.decode(case["prompt_tokens"], skip_special_tokens=False) == case["prompt"]
    assert tokenizer.decode(case["greedy"], skip_special_tokens=False) == case["greedy_text"]


@given(text=TEXT)
@settings(deadline=None)
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in tokens) == text.encode()
    assert tokenizer.decode(tokens) == text


def test_token_bytes_are_true_utf8_and_not_the_display_form(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("The capital")] == [b"The", b" capital"]
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("東")] == [b"\xe6\x9d", b"\xb1"]
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_id_beyond_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.token_bytes(49_152) == b""
    assert tokenizer.decode([504, 49_152, 3575]) == "The capital"


def test_bundled_model_names_its_special_tokens(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert tokenizer.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template


def test_string_of_a_special_token_encodes_to_its_single_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2]


def test_string_of_a_special_token_can_be_encoded_as_plain_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode_plain("a <|im_end|> b")
    assert 2 not in tokens
    assert tokenizer.decode(tokens) == "a <|im_end|> b"


def test_half_of_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        tokenizer.encode("cut emoji \ud83d")


def test_threads_share_one_tokenizer(bundled_gguf: Path) -> None:
    fresh = load_tokenizer(bundled_gguf)
    prompts = [case["prompt"] for case in CASES] * 20
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda prompt: fresh.decode(fresh.encode(prompt), skip_special_tokens=False), prompts)) == prompts


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_folder_loads_and_round_trips(name: str) -> None:
    toy = load_tokenizer(GOLDEN / name)
    assert toy.encode("t17 t18") == [17, 18]
    assert toy.decode([1, 17, 18, 2]) == "t17 t18"
    assert toy.decode([17, 2], skip_special_tokens=False) == "t17 </s>"
    assert toy.token_bytes(17) == b"t17"
    assert toy.eos_ids == {2}
    assert toy.chat_template is None


def save_folder(path: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for name, content in {"tokenizer_config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def word_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<end>": 2, "word": 3}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def sentencepiece(prepend_scheme: str = "first") -> tokenizers.Tokenizer:
    """What a Llama 2 tokenizer.json holds, in small: a marker for spaces, and bytes for what is not in the vocabulary."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: token for token, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True, fuse_unk=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.mark.parametrize(("configured", "expected"), [(2, {1, 2}), ([2, 3], {1, 2, 3}), (None, {1})])
def test_generation_config_adds_to_the_tokens_that_end_generation(tmp_path: Path, configured: Any, expected: set[int]) -> None:
    folder = save_folder(tmp_path, word_level(), generation_config={"eos_token_id": configured})
    assert load_tokenizer(folder).eos_ids == expected


def test_chat_template_is_the_folders_own_unless_another_is_given(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, word_level())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(folder).chat_template == "{{ messages }}"
    assert load_tokenizer(folder, chat_template="{{ bos_token }}").chat_template == "{{ bos_token }}"


def test_chat_template_is_found_in_the_tokenizer_config(tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    assert load_tokenizer(save_folder(tmp_path, word_level(), tokenizer_config=config)).chat_template == "{{ messages }}"


@given(text=st.text(st.sampled_from("ab é東🎉\n")).filter(lambda text: not text.startswith(" ")))  # Metaspace puts no space before one
@settings(deadline=None)
def test_byte_fallback_round_trips(text: str) -> None:
    spm = Tokenizer(sentencepiece())
    tokens = spm.encode(text)
    assert spm.decode(tokens) == text == spm.backend.decode(tokens)
    assert b"".join(spm.token_bytes(token) for token in tokens).removeprefix(b" ") == text.encode()


def test_byte_fallback_token_is_its_raw_byte(tmp_path: Path) -> None:
    spm = load_tokenizer(save_folder(tmp_path, sentencepiece()))
    assert [spm.token_bytes(token) for token in spm.encode("a東")] == [b" a", b"\xe6", b"\x9d", b"\xb1"]


def test_invalid_byte_does_not_spoil_the_character_before_it() -> None:
    spm = Tokenizer(sentencepiece())
    assert spm.decode([*spm.encode("東"), spm.encode("東")[-1]]) == "東\ufffd"


def test_plain_stretch_inside_a_text_gets_no_space_before_it() -> None:
    spm = Tokenizer(sentencepiece("first"))
    assert spm.encode("<s>a", add_special_tokens=False) == [0, *spm.encode_plain("a")]


def test_metaspace_decoder_drops_the_space_that_encoding_put_first() -> None:
    backend = sentencepiece("always")
    backend.decoder = decoders.Metaspace()
    unigram = Tokenizer(backend)
    assert unigram.decode(unigram.encode("a b  a")) == "a b  a"


def test_unknown_decoder_is_refused_by_name() -> None:
    backend = word_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(StartupError, match="WordPiece.*--tokenizer"):
        Tokenizer(backend)


@pytest.mark.parametrize("content", ["{", "{}", '{"version": "1.0", "model": {"type": "Nonsense"}}'])
def test_folder_with_a_broken_tokenizer_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=str(tmp_path)) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_path_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for path in (tmp_path, tmp_path / "model.bin", tmp_path / "none", tmp_path / "none.gguf"):
        with pytest.raises(StartupError, match=str(path)):
            load_tokenizer(path)


def test_nobody_reads_that_torch_is_missing() -> None:
    """And importing the room is quick: transformers waits until a folder is loaded."""
    program = (
        "import sys, pathlib, levserve.text.chat, levserve.text.tokenizer as t; assert 'transformers' not in sys.modules;"
        f"t.load_tokenizer(pathlib.Path({str(GOLDEN / 'llama')!r})); assert 'transformers' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def save_gguf(
    path: Path, *, pre: str | None = "smollm", model: str = "gpt2", add_bos: bool | None = None, merges: tuple[str, ...] = ("a b",)
) -> Path:
    """A vocabulary of single bytes, whatever `merges` make, and one control and one user-defined token."""
    tokens = ["<bos>", "<think>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    writer = GGUFWriter(path / "model.gguf", "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 4, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path / "model.gguf"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["1234"]),
        ("default", ["1234"]),
    ],
)
def test_gguf_pre_tokenizer_splits_digits_as_its_model_does(tmp_path: Path, pre: str, words: list[str]) -> None:
    path = save_gguf(tmp_path, pre=pre, merges=("1 2", "12 3", "123 4"), add_bos=False)
    loaded = load_tokenizer(path)
    assert [loaded.decode([token]) for token in loaded.encode("1234")] == words


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"), [("smollm", None, 0), ("smollm", True, 1), ("llama-bpe", None, 1), ("llama-bpe", False, 0)]
)
def test_gguf_bos_is_added_as_the_file_says_or_as_its_kind_does(tmp_path: Path, pre: str, add_bos: bool | None, expected: int) -> None:
    loaded = load_tokenizer(save_gguf(tmp_path, pre=pre, add_bos=add_bos))
    assert loaded.encode("ab").count(0) == expected
    assert loaded.encode("ab", add_special_tokens=False).count(0) == 0


def test_gguf_qwen2_text_is_composed_first(tmp_path: Path) -> None:
    loaded = load_tokenizer(save_gguf(tmp_path, pre="qwen2"))
    assert loaded.decode(loaded.encode("e\u0301")) == "\u00e9"


def test_gguf_user_defined_token_is_one_token_and_is_shown(tmp_path: Path) -> None:
    loaded = load_tokenizer(save_gguf(tmp_path))
    assert loaded.encode("<think>") == [1]
    assert loaded.decode([0, 1]) == "<think>"


@pytest.mark.parametrize(
    ("model", "pre", "named"), [("llama", "default", "'llama'"), ("gpt2", "tekken", "'tekken'"), ("gpt2", None, "None")]
)
def test_gguf_vocabulary_of_another_kind_is_refused_by_name(tmp_path: Path, model: str, pre: str | None, named: str) -> None:
    path = save_gguf(tmp_path, model=model, pre=pre)
    with pytest.raises(StartupError, match=f"{named}.*--tokenizer"):
        load_tokenizer(path)


def test_gguf_merges_that_do_not_fit_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be used"):
        load_tokenizer(save_gguf(tmp_path, merges=("no such",)))


@pytest.mark.parametrize("size", [0, 3, 20, 500, 3_500])
def test_gguf_file_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    path = save_gguf(tmp_path)
    assert path.stat().st_size > 3_500
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StartupError, match=str(path)):
        load_tokenizer(path)


def test_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(StartupError, match="not a GGUF file"):
        load_tokenizer(path)
