"""Tokenizers: the golden cases, every kind of vocabulary, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from levserve.errors import BadRequest, StartupError
from levserve.text import gguf_vocab
from levserve.text.tokenizer import Tokenizer, load_tokenizer
from levserve.text.vocabulary import Vocabulary
from tests.conftest import FAMILIES, GOLDEN

CASES = json.loads((GOLDEN / "smollm2-135m.json").read_text(encoding="utf-8"))["cases"]
# SmolLM2's vocabulary lacks some control characters and the bytes that begin characters above U+3FFFF.
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
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in tokens) == text.encode()
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_token_bytes_are_true_utf8_and_not_the_display_form(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("The capital")] == [
        b"The",
        b" capital",
    ]
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("東")] == [b"\xe6\x9d", b"\xb1"]
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_id_beyond_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.token_bytes(49_152) == b""
    assert tokenizer.decode([504, 49_152, 3575]) == "The capital"


def test_bundled_model_names_its_special_tokens(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
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
        assert (
            list(
                threads.map(
                    lambda prompt: fresh.decode(fresh.encode(prompt), skip_special_tokens=False), prompts
                )
            )
            == prompts
        )


@pytest.mark.parametrize("name", FAMILIES)
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
    backend = tokenizers.Tokenizer(
        models.WordLevel({"<s>": 0, "</s>": 1, "<end>": 2, "word": 3}, unk_token="<s>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def sentencepiece(prepend_scheme: str = "first") -> tokenizers.Tokenizer:
    """A small Llama 2 tokenizer.json: a marker for spaces, and bytes for what is not in the vocabulary."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: token for token, piece in enumerate(pieces)},
            [("▁", "a")],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(2, {1, 2}), ([2, 3], {1, 2, 3}), (None, {1}), (-1, {1}), ([2, 10**9], {1, 2})],
)
def test_generation_config_adds_to_the_tokens_that_end_generation(
    tmp_path: Path, configured: Any, expected: set[int]
) -> None:
    folder = save_folder(tmp_path, word_level(), generation_config={"eos_token_id": configured})
    assert load_tokenizer(folder).eos_ids == expected


@pytest.mark.parametrize("configured", ["x", 1.5, [1, "a"], True, {}])
def test_an_end_token_that_is_no_number_is_refused_with_its_file(tmp_path: Path, configured: Any) -> None:
    folder = save_folder(tmp_path, word_level(), generation_config={"eos_token_id": configured})
    with pytest.raises(StartupError, match=r"generation_config\.json: eos_token_id = .* is not a token"):
        load_tokenizer(folder)


def test_added_tokens_are_spelt_like_others_as_with_tokenizers_itself(tmp_path: Path) -> None:
    vocab = {"<s>": 0, "</s>": 1, "▁": 2, "▁▁": 3, "a": 4, "b": 5, "<0x0A>": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "▁")], unk_token="<s>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([tokenizers.AddedToken("▁▁", normalized=False)])
    loaded = load_tokenizer(save_folder(tmp_path, backend))
    tokens = [4, 3, 3, 5, 6, 2, 4]
    assert loaded.decode(tokens) == backend.decode(tokens) == "a    b\n a"
    assert loaded.token_bytes(3) == b"  "


def test_ids_may_be_missing_below_the_largest(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "word": 1, "</s>": 9}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    loaded = load_tokenizer(save_folder(tmp_path, backend))
    assert (loaded.vocab_size, loaded.token_bytes(5)) == (10, b"")


def test_chat_template_is_the_folders_own_unless_another_is_given(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, word_level())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(folder).chat_template == "{{ messages }}"
    assert load_tokenizer(folder, chat_template="{{ bos_token }}").chat_template == "{{ bos_token }}"


SEVERAL = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages }}"}]


@pytest.mark.parametrize("template", ["{{ messages }}", SEVERAL])
def test_chat_template_is_found_in_a_json_file_of_its_own(tmp_path: Path, template: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "older"}
    folder = save_folder(
        tmp_path, word_level(), tokenizer_config=config, chat_template={"chat_template": template}
    )
    assert load_tokenizer(folder).chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("newest")
    assert load_tokenizer(folder).chat_template == "newest"


def test_chat_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="chat_template is not a string"):
        load_tokenizer(save_folder(tmp_path, word_level(), chat_template={"chat_template": 3}))


def test_chat_template_is_found_in_the_tokenizer_config(tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    assert (
        load_tokenizer(save_folder(tmp_path, word_level(), tokenizer_config=config)).chat_template
        == "{{ messages }}"
    )


# Metaspace puts no space before a space.
@given(text=st.text(st.sampled_from("ab é東🎉\n")).filter(lambda text: not text.startswith(" ")))
def test_byte_fallback_round_trips(text: str) -> None:
    spm = Tokenizer(Vocabulary(sentencepiece()))
    tokens = spm.encode(text)
    assert spm.decode(tokens) == text == spm.backend.decode(tokens)
    assert b"".join(spm.token_bytes(token) for token in tokens).removeprefix(b" ") == text.encode()


def test_byte_fallback_token_is_its_raw_byte(tmp_path: Path) -> None:
    spm = load_tokenizer(save_folder(tmp_path, sentencepiece()))
    assert [spm.token_bytes(token) for token in spm.encode("a東")] == [b" a", b"\xe6", b"\x9d", b"\xb1"]


def test_invalid_byte_does_not_spoil_the_character_before_it() -> None:
    spm = Tokenizer(Vocabulary(sentencepiece()))
    assert spm.decode([*spm.encode("東"), spm.encode("東")[-1]]) == "東\ufffd"


def test_plain_stretch_inside_a_text_gets_no_space_before_it() -> None:
    spm = Tokenizer(Vocabulary(sentencepiece("first")))
    assert spm.encode("<s>a", add_special_tokens=False) == [0, *spm.encode_plain("a")]


def test_metaspace_decoder_drops_the_space_that_encoding_put_first() -> None:
    backend = sentencepiece("always")
    backend.decoder = decoders.Metaspace()
    unigram = Tokenizer(Vocabulary(backend))
    assert unigram.decode(unigram.encode("a b  a")) == "a b  a"


def test_unknown_decoder_is_refused_by_name() -> None:
    backend = word_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(StartupError, match="WordPiece.*--tokenizer"):
        Tokenizer(Vocabulary(backend))


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


# Sentencepiece

PIECES = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
]
WORDS = [
    "▁t",
    "he",
    "▁the",
    "in",
    "▁a",
    "er",
    "▁there",
    "▁",
    "e",
    "t",
    "h",
    "r",
    "a",
    "n",
    "i",
    "</",
    "s",
    ">",
]
PIECES += [(word, -float(rank), 1) for rank, word in enumerate(WORDS)]
PIECES += [("<|user|>", -1000.0, 3), ("<tab>", -1000.0, 4)]
IDS = {text: token for token, (text, _, _) in enumerate(PIECES)}


SPACES = [("▁▁", 0.0, 4), ("▁▁▁▁", 0.0, 4)]
"""Runs of spaces that a user defined, as Gemma's vocabulary has them."""


def protobuf(pieces: list[tuple[str, float, int]] = PIECES, **changes: bool) -> bytes:
    """A tokenizer.model: pieces, the kind of model (2 is BPE) and whether a space is put first."""

    def field(number: int, value: bytes | int | float) -> bytes:
        if isinstance(value, float):
            return bytes([number << 3 | 5]) + struct.pack("<f", value)
        if isinstance(value, int):
            return bytes([number << 3, value])
        return bytes([number << 3 | 2]) + (bytes([len(value)]) if len(value) < 128 else b"") + value

    entries = [
        field(1, field(1, text.encode()) + field(2, score) + field(3, kind)) for text, score, kind in pieces
    ]
    trainer, normalizer = (
        field(3, 1 if changes.get("is_unigram") else 2),
        field(3, int(changes.get("adds_space", True))),
    )
    return b"".join(entries) + field(2, trainer) + field(3, normalizer)


def spm_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    adds_space: bool | None = None,
    eos: int = 2,
    pieces: list[tuple[str, float, int]] = PIECES,
) -> Path:
    writer = GGUFWriter(path / "spm.gguf", architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    if adds_space is not None:
        writer.add_add_space_prefix(adds_space)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path / "spm.gguf"


def spm_folder(path: Path, pieces: list[tuple[str, float, int]] = PIECES, **changes: bool) -> Path:
    (path / "tokenizer.model").write_bytes(protobuf(pieces, **changes))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )
    return path


def test_a_gguf_end_token_that_is_none_or_beyond_the_vocabulary_is_told_apart(tmp_path: Path) -> None:
    none = load_tokenizer(spm_gguf(tmp_path, eos=2**32 - 1))
    assert (none.eos_token, none.eos_ids) == (None, frozenset())
    with pytest.raises(StartupError, match=r"eos_token_id = 9999 is not one of \d+ tokens"):
        load_tokenizer(spm_gguf(tmp_path, eos=9999))


@pytest.mark.parametrize("adds_space", [False, True])
@pytest.mark.parametrize("save", [spm_gguf, spm_folder])
def test_runs_of_spaces_that_a_user_defined_are_one_token(
    tmp_path: Path, save: Callable[..., Path], adds_space: bool
) -> None:
    pieces = [*PIECES, *SPACES]
    loaded = load_tokenizer(save(tmp_path, pieces=pieces, adds_space=adds_space))
    tokens = loaded.encode("a    a", add_special_tokens=False)
    first = "▁a" if adds_space else "a"
    assert [pieces[token][0] for token in tokens] == [first, "▁▁▁▁", "a"]
    assert loaded.decode(tokens) == "a    a"


@pytest.fixture(scope="module", params=[spm_gguf, spm_folder])
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(request.param(tmp_path_factory.mktemp("spm")))


def spelt(tokenizer: Tokenizer, text: str) -> list[str]:
    return [PIECES[token][0] for token in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("there", ["▁the", "r", "e"]),  # "▁the" (2) is better than "er" (5), so "▁there" is never reached
        ("the in", ["▁the", "▁", "in"]),
        (" the", ["▁", "▁the"]),
        ("a\né", ["▁a", "<0x0A>", "<0xC3>", "<0xA9>"]),
        ("he</s>he", ["▁", "he", "</s>", "▁", "he"]),
        ("in<tab>in", ["▁", "in", "<tab>", "▁", "in"]),
    ],
)
def test_sentencepiece_merges_the_best_piece_first(spm: Tokenizer, text: str, expected: list[str]) -> None:
    assert spelt(spm, text) == ["<s>", *expected]
    assert (spm.bos_token, spm.eos_token, spm.eos_ids) == ("<s>", "</s>", {2})


@given(text=st.text(st.sampled_from("then ira é東\n/s>")))
def test_sentencepiece_round_trips(spm: Tokenizer, text: str) -> None:
    assert spm.decode(spm.encode(text)) == text


def test_control_token_of_sentencepiece_is_never_made_of_text(spm: Tokenizer) -> None:
    assert IDS["</s>"] not in spm.encode_plain("</s>")
    assert spm.decode(spm.encode_plain("</s>")) == "</s>"


@pytest.mark.parametrize(("reader", "flag"), [(spm_gguf, "adds_space"), (spm_folder, "adds_space")])
def test_sentencepiece_without_a_first_space(reader: Any, flag: str, tmp_path: Path) -> None:
    loaded = load_tokenizer(reader(tmp_path, **{flag: False}))
    assert spelt(loaded, "the in") == ["<s>", "t", "he", "▁", "in"]
    assert loaded.decode(loaded.encode(" the")) == " the"


def test_special_tokens_of_phi3_take_the_spaces_after_them(tmp_path: Path) -> None:
    assert spelt(load_tokenizer(spm_gguf(tmp_path, architecture="phi3")), "<|user|>\n the") == [
        "<s>",
        "<|user|>",
        "▁the",
    ]
    assert spelt(load_tokenizer(spm_gguf(tmp_path)), "<|user|> a") == ["<s>", "<|user|>", "▁", "▁a"]


def test_sentencepiece_folder_takes_the_tokens_that_its_configuration_adds(tmp_path: Path) -> None:
    config = {
        "added_tokens_decoder": {
            f"{len(PIECES)}": {"content": "<|end|>", "rstrip": True, "special": True, "normalized": True}
        }
    }
    (spm_folder(tmp_path) / "tokenizer_config.json").write_text(
        json.dumps({**config, "eos_token": "<|end|>", "pad_token": "[PAD]"})
    )
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token, loaded.eos_ids) == (
        "<s>",
        "<|end|>",
        None,
        {len(PIECES)},
    )
    assert loaded.encode("the<|end|>  the") == [IDS["<s>"], IDS["▁the"], len(PIECES), IDS["▁the"]]


def test_unigram_model_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    assert spelt(load_tokenizer(spm_folder(tmp_path, is_unigram=True)), "there a") == ["<s>", "▁there", "▁a"]


@pytest.mark.parametrize("content", [b"", b"IQ== 0\nIg== 1\n", protobuf()[:-7], b"\x0a\x03\x0a\x01\xff"])
def test_tokenizer_model_that_is_not_sentencepiece_is_refused_in_one_line(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(
        StartupError, match="tokenizer.model is not a sentencepiece model.*--tokenizer"
    ) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def save_gguf(
    path: Path,
    *,
    pre: str | None = "smollm",
    model: str = "gpt2",
    add_bos: bool | None = None,
    merges: tuple[str, ...] = ("a b",),
) -> Path:
    """Saves a vocabulary of single bytes, the results of `merges`, one control and one user-defined token."""
    tokens = [
        "<bos>",
        "<think>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(merge.replace(" ", "") for merge in merges),
    ]
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
        ("dbrx", ["123", "4"]),
        ("gpt-4o", ["123", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
        ("glm4", ["123", "4"]),
        ("chatglm-bpe", ["123", "4"]),
        ("deepseek-v3", ["123", "4"]),
        ("deepseek-llm", ["1", "2", "3", "4"]),
        ("olmo", ["1234"]),
        ("gpt-2", ["1234"]),
        ("default", ["1234"]),
    ],
)
def test_gguf_pre_tokenizer_splits_digits_as_its_model_does(
    tmp_path: Path, pre: str, words: list[str]
) -> None:
    path = save_gguf(tmp_path, pre=pre, merges=("1 2", "12 3", "123 4"), add_bos=False)
    loaded = load_tokenizer(path)
    assert [loaded.decode([token]) for token in loaded.encode("1234")] == words


@pytest.mark.parametrize(
    ("pre", "words"), [("llama-bpe", ["abAB"]), ("gpt-4o", ["ab", "AB"]), ("tekken", ["ab", "AB"])]
)
def test_gguf_pre_tokenizer_splits_words_where_its_model_does(
    tmp_path: Path, pre: str, words: list[str]
) -> None:
    loaded = load_tokenizer(save_gguf(tmp_path, pre=pre, merges=("a b", "A B", "ab AB"), add_bos=False))
    assert [loaded.decode([token]) for token in loaded.encode("abAB")] == words


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-llm", ["it", "'", "s", " ", "你", " a", ".", "\n", "\n", "b", "  "]),
        ("deepseek-v3", ["it", "'s", " ", "你", " a", ".\n\n", "b", "  "]),
        ("glm4", ["it", "'s", " 你", " a", ".\n\n", "b", "  "]),
    ],
)
def test_gguf_pre_tokenizer_splits_signs_and_lines_as_its_model_does(pre: str, words: list[str]) -> None:
    text = "it's 你 a.\n\nb  "
    found = [text[slice(*place)] for _, place in gguf_vocab._splittings()[pre].words.pre_tokenize_str(text)]
    assert found == words


@pytest.mark.parametrize(
    ("name", "kind", "is_end"), [("<end_of_turn>", 4, True), ("<|end|>", 3, True), ("<|end|>", 1, False)]
)
def test_gguf_ends_at_the_tokens_llama_cpp_ends_at(
    tmp_path: Path, name: str, kind: int, is_end: bool
) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), name, "ab"]
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([*[1] * 256, kind, 1])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert (256 in load_tokenizer(tmp_path / "model.gguf").eos_ids) is is_end


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [("smollm", None, 0), ("smollm", True, 1), ("llama-bpe", None, 1), ("llama-bpe", False, 0)],
)
def test_gguf_bos_is_added_as_the_file_says_or_as_its_kind_does(
    tmp_path: Path, pre: str, add_bos: bool | None, expected: int
) -> None:
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
    ("model", "pre", "named"),
    [("bert", "default", "'bert'"), ("gpt2", "kimi-k2", "'kimi-k2'"), ("gpt2", None, "None")],
)
def test_gguf_vocabulary_of_another_kind_is_refused_by_name(
    tmp_path: Path, model: str, pre: str | None, named: str
) -> None:
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
