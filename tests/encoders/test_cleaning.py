"""Cleaning prompts, against diffusers'."""

import pytest

from calotype.encoders.cleaning import cleaned


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "  \n ",
        "a cat",
        "  two\tdogs \n\n run\u00a0far\u3000away ",
        "cats &amp; dogs &amp;lt;3 &amp;amp;amp; &quot;x&quot; &eacute;",
        "色调艳丽，过曝，静态",
        "\x1czero\u200bwidth \x1c separators \x85 \u2028 end \x1f",
    ],
)
def test_it_is_diffusers_without_ftfy(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.wan import pipeline_wan

    monkeypatch.setattr(pipeline_wan, "is_ftfy_available", lambda: False)
    assert cleaned(prompt) == pipeline_wan.prompt_clean(prompt)


def test_what_is_clean_stays() -> None:
    assert cleaned(" a  cat &amp;amp; &lt;b&gt; ") == "a cat & <b>"
    assert cleaned(cleaned(" a  cat ")) == "a cat"
