"""Text to ids and back."""

from pathlib import Path

import pytest

from calotype.language.tokenizer import Tokenizer, load_tokenizer
from calotype.plate.training.objects import object_names


@pytest.mark.parametrize("text", ["a fox on the grass", "two foxes, gray background", "naïve 狐 🦊 #1", "", "x"])
def test_lower_case_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_case_and_spaces_do_not_matter(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("  A  Fox\n on the\tGRASS ") == tokenizer.encode("a fox on the grass")


def test_every_word_for_an_object_is_one_or_two_tokens(tokenizer: Tokenizer) -> None:
    for entry in object_names():
        for word in " ".join((entry.name, entry.plural, *entry.synonyms)).split():
            assert len(tokenizer.encode(word)) <= 2, word


def test_marks_in_a_text_are_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a <eos> fox <expand> <pad>")
    special = tokenizer.special
    assert not {special.pad, special.bos, special.eos, special.expand} & set(ids)
    assert tokenizer.decode(ids) == "a <eos> fox <expand> <pad>"
    assert tokenizer.vocab_size == 1024
    assert (special.pad, special.bos, special.eos, special.expand) == (0, 1, 2, 3)


def test_marks_are_not_shown(tokenizer: Tokenizer) -> None:
    special = tokenizer.special
    assert tokenizer.decode([special.bos, *tokenizer.encode("a fox"), special.eos, special.pad]) == "a fox"


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer file at"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("not json", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a tokenizer file"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_file_without_marks_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as RawTokenizer
    from tokenizers.models import BPE

    RawTokenizer(BPE()).save(str(tmp_path / "plain.json"))
    with pytest.raises(ValueError, match="has no <pad> token"):
        load_tokenizer(tmp_path / "plain.json")
