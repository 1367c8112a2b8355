"""Text to ids and back; exact bytes; what GGUF files and directories say about their tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from trellis.errors import InvalidRequestError, ModelLoadError
from trellis.runtime.models import Tokenizer, load_tokenizer
from trellis.runtime.models.byte_tokens import byte_alphabet
from trellis.runtime.models.gguf_file import read_gguf
from trellis.runtime.models.tokenizer import from_gguf

# Bytes that the default model's vocabulary cannot spell at all.
MISSING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2, 0xC0, 0xC1, *range(0xF5, 0x100)}
spellable = st.text().filter(lambda text: MISSING.isdisjoint(text.encode()))


@pytest.fixture(scope="session")
def smollm(model_path: Path) -> Tokenizer:
    return load_tokenizer(model_path)


# Ids as the tokenizer that was published with the model gives them.
@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("2024", [34, 32, 34, 36]),
        ("In 2024 we", [788, 216, 34, 32, 34, 36, 392]),
        ("Hello world  two", [19556, 905, 216, 827]),
        ("naïve café 你好 🙂", [3546, 46494, 37366, 216, 18645, 250, 48392, 138, 47526]),
        ("\n\n x\t y", [1116, 1792, 197, 329]),
        ("don't I'LL", [12420, 982, 339, 23, 16421]),
        ("<|im_start|>user", [1, 4093]),
        ("", []),
    ],
)
def test_known_encodings(smollm, text, ids):
    assert smollm.encode(text) == ids
    assert smollm.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_digits_stand_alone(smollm):
    ids = smollm.encode("1234567890" * 3)
    assert len(ids) == 30


@pytest.mark.model
@settings(deadline=None, max_examples=200)
@given(text=spellable)
def test_round_trip(smollm, text):
    ids = smollm.encode(text)
    assert smollm.decode(ids, skip_special_tokens=False) == text
    assert b"".join(smollm.token_bytes[i] for i in ids) == text.encode()


@pytest.mark.model
def test_properties_of_the_default_model(smollm):
    assert smollm.vocab_size == len(smollm.token_bytes) == 49152
    assert smollm.eos_token_ids == {2}
    assert smollm.bos_token_id == 1
    assert smollm.special_token_ids == set(range(17))
    assert smollm.has_chat_template
    assert smollm.token_bytes[2] == b"<|im_end|>"
    singles = {data[0] for data in smollm.token_bytes if len(data) == 1}
    assert set(range(256)) - singles == MISSING


@pytest.mark.model
def test_vocabulary_hides_special_tokens(smollm):
    vocabulary = smollm.vocabulary()
    assert [i for i, data in enumerate(vocabulary.token_bytes) if not data] == list(range(17))
    assert vocabulary.size == 49152
    assert vocabulary.mask_words == 1536
    assert vocabulary.eos_token_ids == {2}
    assert vocabulary.encode("<|im_end|>") == smollm.encode_plain("<|im_end|>")
    assert smollm.special_token_ids.isdisjoint(vocabulary.encode("a<|im_end|>b"))
    assert vocabulary.fingerprint == load_tokenizer_again(smollm).vocabulary().fingerprint


def load_tokenizer_again(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer(
        tokenizer.backend, eos_token_ids=tokenizer.eos_token_ids, vocab_size=tokenizer.vocab_size
    )


@pytest.mark.model
def test_vocabularies_that_differ_have_other_fingerprints(smollm):
    other = Tokenizer(smollm.backend, eos_token_ids={0}, vocab_size=smollm.vocab_size)
    wider = Tokenizer(smollm.backend, eos_token_ids={2}, vocab_size=smollm.vocab_size + 8)
    prints = {t.vocabulary().fingerprint for t in (smollm, other, wider)}
    assert len(prints) == 3
    assert wider.token_bytes[-8:] == [b""] * 8


@pytest.mark.model
def test_lone_surrogates_are_the_clients_mistake(smollm):
    with pytest.raises(InvalidRequestError, match="character 2 is a lone surrogate"):
        smollm.encode("ab\ud800")


@pytest.mark.model
def test_chat_renders_as_transformers_renders_it(smollm, model_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    source = read_gguf(model_path).metadata["tokenizer.chat_template"]
    conversations = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n there "}],
        [{"role": r, "content": f"{i} <é>"} for i, r in enumerate(["user", "assistant"] * 3)],
    ]
    for messages in conversations:
        for prompt in (True, False):
            want, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=prompt)
            assert smollm.render_chat(messages, prompt) == want[0]
            assert smollm.chat_format().render(messages, prompt) == want[0]
    assert smollm.chat_format().exact


@pytest.mark.model
def test_tokenizer_needs_neither_torch_nor_transformers(model_path):
    code = (
        "import sys, pathlib; from trellis.runtime.models import load_tokenizer, load_config; "
        f"path = pathlib.Path({str(model_path)!r}); load_config(path); t = load_tokenizer(path); t.vocabulary(); "
        "t.chat_format(); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Small tokenizers of our own, in the forms in which they are published.


def byte_level(words: list[str], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    vocabulary = {char: i for i, char in enumerate([*byte_alphabet(), *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def save_directory(path: Path, backend: tokenizers.Tokenizer, **files: dict[str, object]) -> Path:
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_directory_says_bos_eos_and_template(tmp_path):
    backend = byte_level(["he", "Ġhe"], [("h", "e"), ("Ġ", "he")])
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>"), AddedToken("<end>")])
    bos, eos, end = 258, 259, 260
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    save_directory(
        tmp_path,
        backend,
        config={"vocab_size": 300, "eos_token_id": eos, "bos_token_id": bos},
        generation_config={"eos_token_id": [eos, end]},
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "ignored"},
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 300
    assert tokenizer.token_bytes[261:] == [b""] * 39
    assert tokenizer.bos_token_id == bos
    assert tokenizer.eos_token_ids == {eos, end}
    assert tokenizer.encode("he he") == [bos, 256, 257]  # BOS in front, and nothing behind
    assert tokenizer.encode("he", add_special_tokens=False) == [256]
    assert tokenizer.encode("<s>he") == [bos, 256]  # not twice
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>x</s>"


def test_ends_beyond_the_vocabulary_can_never_come(tmp_path):
    save_directory(tmp_path, byte_level([], []), config={"vocab_size": 256, "eos_token_id": [7, 256, -1]})
    assert load_tokenizer(tmp_path).eos_token_ids == {7}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of them, not 'x'"),
        ({"eos_token_id": [1, None]}, r"a list of them, not \[1, None\]"),
        ({"bos_token_id": 256}, "bos_token_id must be one of the 256 tokens, from 0 on, not 256"),
    ],
)
def test_ids_that_are_none_are_refused(tmp_path, config, message):
    save_directory(tmp_path, byte_level([], []), config={"vocab_size": 256, **config})
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(tmp_path)


def test_add_bos_token_of_the_config_decides(tmp_path):
    backend = byte_level([], [])
    backend.add_special_tokens(["<s>"])
    for said, want in ((True, [256]), (False, [])):
        config = {"bos_token": "<s>", "add_bos_token": said}
        save_directory(tmp_path, backend, tokenizer_config=config)
        assert load_tokenizer(tmp_path).encode("a")[:-1] == want


def test_named_templates_take_the_default_one(tmp_path):
    templates = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    save_directory(tmp_path, byte_level([], []), tokenizer_config={"chat_template": templates})
    assert load_tokenizer(tmp_path).render_chat([]) == "yes"


def test_model_without_a_template_uses_plain_names(tmp_path):
    tokenizer = load_tokenizer(save_directory(tmp_path, byte_level([], [])))
    assert not tokenizer.has_chat_template
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "USER: hi\nASSISTANT: "
    assert tokenizer.chat_format().exact


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.json", "{}", "has no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", "{", "not valid JSON"),
    ],
)
def test_broken_directories_say_what_is_wrong(tmp_path, name, content, message):
    if name == "tokenizer_config.json":
        save_directory(tmp_path, byte_level([], []))
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(tmp_path)


def test_vocabularies_of_unknown_spelling_are_refused():
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(backend, eos_token_ids=())


# GGUF files that are nothing but a tokenizer.


def write_gguf(path: Path, model: str, tokens: list[str], types: list[int], **more: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


BYTES = [*byte_alphabet()]
DIGIT_MERGES = [*BYTES, "20", "24", "Ġ2", "ab"]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("smollm", ["Ġ", "2", "0", "2", "4"]),
        ("gpt-2", ["Ġ2", "0", "24"]),
        ("qwen2", ["Ġ", "2", "0", "2", "4"]),
        ("llama-bpe", ["Ġ", "20", "2", "4"]),
    ],
)
def test_pre_tokenizer_that_the_file_names(tmp_path, rule, words):
    path = write_gguf(
        tmp_path / "t.gguf",
        "gpt2",
        DIGIT_MERGES,
        [1] * len(DIGIT_MERGES),
        tokenizer_pre=rule,
        token_merges=["Ġ 2", "2 0", "2 4", "a b"],
        add_bos_token=False,
    )
    tokenizer = load_tokenizer(path)
    assert [DIGIT_MERGES[i] for i in tokenizer.encode(" 2024")] == words
    assert tokenizer.decode(tokenizer.encode(" 2024 ab")) == " 2024 ab"


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    path = write_gguf(
        tmp_path / "t.gguf", "gpt2", BYTES, [1] * 256, tokenizer_pre="martian", token_merges=["a b"]
    )
    with pytest.raises(ModelLoadError, match=r"'martian'.*smollm.*tokenizer.json"):
        load_tokenizer(path)


def sentencepiece_gguf(path: Path, **more: object) -> Path:
    pieces = ["▁", "h", "e", "l", "o", "▁h", "▁he", "ll", "llo", "▁hello", "he", "w", "▁w", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return write_gguf(
        path,
        "llama",
        tokens,
        types,
        token_scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        **more,
    )


def test_sentencepiece_with_byte_fallback(tmp_path):
    tokenizer = load_tokenizer(sentencepiece_gguf(tmp_path / "t.gguf"))
    ids = tokenizer.encode("hello wé\n")
    assert ids[0] == 1
    assert b"".join(tokenizer.token_bytes[i] for i in ids[1:]) == " hello wé\n".encode()
    assert tokenizer.decode(ids) == "hello wé\n"
    assert [tokenizer.token_bytes[i] for i in ids[1:]] == [b" hello", b" w", "é".encode(), b"\n"]
    assert tokenizer.token_bytes[3 + 0x0A] == b"\n"
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.vocabulary().token_bytes[1] == b""


def test_sentencepiece_merges_as_transformers_does(tmp_path):
    from transformers import AutoTokenizer

    path = sentencepiece_gguf(tmp_path / "t.gguf")
    tokenizer = load_tokenizer(path)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ("hello", "hello hello", "he llo whe", "hell\to", "日本 é"):
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(
            text, add_special_tokens=False
        )


def test_sentencepiece_without_space_prefix(tmp_path):
    tokenizer = load_tokenizer(sentencepiece_gguf(tmp_path / "t.gguf", add_space_prefix=False))
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == b"hello"
    assert tokenizer.decode(tokenizer.encode(" hello", add_special_tokens=False)) == " hello"


def test_eos_of_a_turn_counts_too(tmp_path):
    path = write_gguf(
        tmp_path / "t.gguf",
        "gpt2",
        [*BYTES, "ab", "<eos>", "<eot>"],
        [1] * 257 + [3, 3],
        token_merges=["a b"],
        eos_token_id=257,
        eot_token_id=258,
    )
    assert from_gguf(read_gguf(path)).eos_token_ids == {257, 258}


def test_merges_outside_the_vocabulary(tmp_path):
    path = write_gguf(tmp_path / "t.gguf", "gpt2", BYTES, [1] * 256, token_merges=["a b"])
    with pytest.raises(ModelLoadError, match="vocabulary and merges do not fit"):
        load_tokenizer(path)


def test_file_without_a_tokenizer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        load_tokenizer(tmp_path / "t.gguf")


def test_kind_of_tokenizer_that_is_not_known(tmp_path):
    path = write_gguf(tmp_path / "t.gguf", "bert", ["a"], [1])
    with pytest.raises(ModelLoadError, match="'bert' is not supported"):
        load_tokenizer(path)
