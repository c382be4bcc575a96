"""Chats to text by the model's own jinja template, exactly as transformers writes them; and reasoning apart from
answers.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.ext import Extension

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
_OPEN, _CLOSE = "<think>", "</think>"

Message = Mapping[str, Any]
Tool = Mapping[str, Any] | Callable[..., Any]


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
    special_tokens: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat, special tokens written out: equal to transformers' `apply_chat_template(tokenize=False)`.

    A message has a `role` and a `content` (a text, or a list of parts; it may be missing beside `tool_calls`). Tools
    are JSON schemas, or functions with types and a docstring, of which transformers makes schemas. `enable_thinking` is
    given to the template unless None, as are `extra` values. Encode the text with `parse_special=True` and
    `add_special_tokens=False`. Templates run in jinja's immutable sandbox and see plain data only.

    Raises:
        ValueError: no messages, a malformed one, a value that is not plain data, a template that is not valid jinja,
            or what the template itself refuses (such as roles that do not alternate).
    """
    import jinja2

    chat = _checked(messages)
    values = {**(special_tokens or {}), **(extra or {})}
    if enable_thinking is not None:
        if type(enable_thinking) is not bool:
            raise ValueError(f"enable_thinking is {enable_thinking!r}; it must be true, false or None")
        values["enable_thinking"] = enable_thinking
    schemas = None if tools is None else _schemas(tools)
    compiled = _compiled(template)
    try:
        return compiled.render(
            messages=chat,
            tools=schemas,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **_plain(values, "a value for the template"),
        )
    except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends inside a block of reasoning that it opened, so that the answer begins with reasoning."""
    return prompt.rstrip().endswith(_OPEN)


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str | None, str]:
    """What stands in a leading <think>...</think>, and the answer after it, both without spaces around the marks.

    No block: (None, the text as it is). A block that does not end is all reasoning, with an empty answer. Where the
    prompt opened the block (`opened`, see `opens_reasoning`), or the text has only the closing mark, the reasoning
    starts with the text.
    """
    body = text.lstrip()
    head, mark, rest = text.partition(_CLOSE)
    if body.startswith(_OPEN):
        head, mark, rest = body.removeprefix(_OPEN).partition(_CLOSE)
    elif not opened and (not mark or _OPEN in head):
        return None, text
    return head.strip(), rest.lstrip()


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain data, without entries that are None, reasoning under each name that templates read."""
    is_list = isinstance(cast(object, messages), Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not messages:
        raise ValueError(f"messages are {messages!r}; they must be a list of at least one role and content")
    return [_message(message, place) for place, message in enumerate(messages)]


def _message(message: object, place: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {place} is {message!r}; it must be a mapping with role and content")
    entries = {name: value for name, value in cast(Message, message).items() if value is not None}
    role, content = entries.get("role"), entries.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {place} has the role {role!r}; it must be a name such as 'user' or 'assistant'")
    if content is None and not entries.keys() & {"tool_calls", *_REASONING_NAMES}:
        raise ValueError(f"message {place} ({role}) has no content; it must be a text or a list of parts")
    if not isinstance(content, str | list | tuple | None):
        raise ValueError(f"message {place} ({role}) has the content {content!r}; it must be a text or a list of parts")
    plain = _plain(entries, f"message {place} ({role})")
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any, what: str) -> Any:
    """A copy in plain types: templates come with models, and get no objects whose methods they could call.

    Raises:
        ValueError: something else than mappings, lists, texts, numbers and None.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(name, what): _plain(each, what) for name, each in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        copies = [_plain(each, what) for each in cast(Sequence[Any], value)]
        return tuple(copies) if isinstance(value, tuple) else copies
    if isinstance(value, str):  # such as members of an enumeration
        return str.__str__(value)
    raise ValueError(f"{what} has {value!r}; templates get mappings, lists, texts, numbers and None only")


def _schemas(tools: Sequence[Tool]) -> list[Any]:
    if isinstance(tools, str | bytes) or not isinstance(cast(object, tools), Sequence):
        raise ValueError(f"tools are {tools!r}; they must be a list of JSON schemas or functions")
    return [_schema(tool) for tool in tools]


def _schema(tool: Tool) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        return _plain(tool, "a tool")
    if not callable(cast(object, tool)):
        raise ValueError(f"a tool is {tool!r}; it must be a JSON schema or a function")
    from transformers.utils import chat_template_utils

    try:
        return _plain(cast(Any, chat_template_utils).get_json_schema(tool), "a tool")
    except Exception as error:  # it has errors of its own for docstrings and types
        raise ValueError(f"no schema can be made of the tool {tool!r}: {error}") from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> "Template":
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid jinja (line {error.lineno}: {error.message})") from error


def _environment() -> "Environment":
    """That of transformers: its sandbox, settings, filters and globals."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    given: dict[str, Any] = {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _namespace(),
    }
    cast(dict[str, Any], environment.globals).update(given)
    return environment


def _generation_tag() -> "type[Extension]":
    """{% generation %}...{% endgeneration %}, which marks what the assistant wrote: the text stands as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Callable[[], str]) -> str:
            return caller()

    Generation.tags = {"generation"}
    return Generation


class _Dict:
    """`dict` for templates, without its attributes."""

    def __call__(self, *pairs: Any, **entries: Any) -> dict[str, Any]:
        return dict(*pairs, **entries)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


def _namespace() -> type:
    """`namespace` for templates, which refuses names that begin with an underscore."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class Names(Namespace):
        def __init__(self, /, *pairs: Any, **entries: Any) -> None:
            names: dict[str, Any] = dict(*pairs, **entries)
            for name in names:
                _check(name)
            super().__init__(names)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

    def _check(name: str) -> None:
        if name.startswith("_"):
            raise SecurityError(f"names of a namespace cannot begin with an underscore, as {name!r} does")

    return Names


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that jinja's own has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
