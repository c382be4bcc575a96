"""Chats to text, against transformers on templates like those of known models; reasoning apart from answers."""

import enum
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from calotype.language.chat import opens_reasoning, render_chat, split_reasoning

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful AI.<|im_end|>\\n' }}
{%- endif %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {% generation %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if loop.index0 == 6 %}{% break %}{% endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- else %}{{- " " + message["content"]|trim + eos_token }}{%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}{% set ns = namespace(prefix='', self='x') %}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set ns.prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set ns.prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (ns.prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}{%- for item in message['content'] -%}
        {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
        {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
    {%- endfor -%}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "mistral": MISTRAL, "gemma": GEMMA}

SYSTEM = {"role": "system", "content": '  Answer <briefly> & in "naïve" words 狐. '}
USER = {"role": "user", "content": "What's 2 + 2?\n"}
ANSWER = {"role": "assistant", "content": " <think>\nadd\n</think>\n\n4, of course ", "name": None}
REASONED = {"role": "assistant", "content": "4", "thinking": "two and two"}
PARTS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What is this? "}]}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {"place": "Zürich <&>"}}}],
}
BARE_CALL = {"role": "assistant", "content": None, "tool_calls": CALL["tool_calls"]}
RESULT = {"role": "tool", "content": "21°"}
SCHEMA = {
    "type": "function",
    "function": {"name": "f", "description": "<b>&'", "parameters": {"type": "object", "properties": {}}},
}


def temperature(place: str, unit: str = "C") -> float:
    """Temperature of a place.

    Args:
        place: Where, such as "Zürich"
        unit: In what unit (choices: ["C", "F"])

    Returns:
        The temperature.
    """
    return len(place + unit)


def _expected(template: str, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    settings = {"add_generation_prompt": True, **options}
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **settings)


def _rendered(template: str, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    return render_chat(template, messages, special_tokens=TOKENS, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "messages", [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, REASONED], [USER, ANSWER] * 4]
)
def test_chats_are_those_of_transformers(name: str, messages: list[dict[str, Any]], prompt: bool) -> None:
    options = {"add_generation_prompt": prompt}
    assert _rendered(TEMPLATES[name], messages, options) == _expected(TEMPLATES[name], messages, options)


@pytest.mark.parametrize(
    ("name", "messages", "options"),
    [
        ("qwen3", [SYSTEM, USER], {"enable_thinking": False}),
        ("qwen3", [USER], {"enable_thinking": True}),
        ("qwen3", [USER, CALL, RESULT], {"tools": [SCHEMA]}),
        ("qwen3", [SYSTEM, USER, BARE_CALL, RESULT, ANSWER, USER], {"tools": [temperature, SCHEMA]}),
        ("qwen3", [USER], {"tools": []}),
        ("llama3", [SYSTEM, USER, CALL, RESULT, ANSWER], {"tools": [SCHEMA, temperature]}),
        ("gemma", [PARTS, ANSWER, USER], {}),
    ],
)
def test_tools_thinking_and_parts(name: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    text = _rendered(TEMPLATES[name], messages, options)
    assert text == _expected(TEMPLATES[name], messages, options)
    if options.get("enable_thinking") is False:
        assert text.endswith("<think>\n\n</think>\n\n")
    if options.get("tools"):
        assert '"<b>&\'"' in text or "Temperature of a place." in text


def test_extra_values_reach_the_template() -> None:
    text = render_chat(
        "{{ a }}{{ bos_token }}{{ b.c }}", [USER], extra={"a": 1, "b": {"c": (2,)}}, special_tokens=TOKENS
    )
    assert text == "1<s>(2,)"
    assert render_chat("{{ bos_token }}{{ x is defined }}", [USER]) == "False"


def test_messages_are_left_alone() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "thinking": "b"}
    text = render_chat("{{ messages[0].content[0].text }}{{ messages[0].reasoning_content }}", [message])
    assert text == "ab"
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}], "thinking": "b"}


def test_members_of_enumerations_are_text() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    assert render_chat("{{ messages[0].role }}", [{"role": Role.USER, "content": ""}]) == "user"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages are"),
        ("hello", "messages are 'hello'; they must be a list"),
        (None, "messages are None; they must be a list"),
        (5, "messages are 5; they must be a list"),
        ({"role": "user", "content": "a"}, "messages are .* they must be a list"),
        (["hello"], "message 0 is 'hello'; it must be a mapping with role and content"),
        ([{"content": "a"}], "message 0 has the role None; it must be a name such as 'user'"),
        ([USER, {"role": 3, "content": "a"}], "message 1 has the role 3"),
        ([{"role": "user"}], r"message 0 \(user\) has no content"),
        (
            [{"role": "user", "content": 5}],
            r"message 0 \(user\) has the content 5; it must be a text or a list of parts",
        ),
        ([{"role": "user", "content": "a", "x": object()}], r"message 0 \(user\) has <object"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_chat(CHATML, messages)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (MISTRAL, [USER, USER], "the chat template refuses these messages: Conversation roles must alternate"),
        (GEMMA, [ANSWER], "refuses these messages: Conversation roles must alternate"),
        (CHATML, [PARTS], "the chat template refuses these messages: "),
        ("{{ messages[0].missing.deep }}", [USER], "refuses these messages: .* has no attribute 'missing'"),
        ("{% for %}", [USER], r"not valid jinja \(line 1"),
        ("{{ messages.append(1) }}", [USER], "refuses these messages: .*append"),
        ("{{ messages[0].__class__.__mro__ }}", [USER], "refuses these messages: .*__class__"),
        ("{{ 1 / 0 }}", [USER], "refuses these messages: division by zero"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", [USER], "refuses these messages: .*recursion"),
        ("{{ namespace(_a=1) }}", [USER], "cannot begin with an underscore"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", [USER], "cannot begin with an underscore"),
    ],
)
def test_what_a_template_refuses_is_an_error(template: str, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_chat(template, messages)


def test_tools_that_cannot_be_described_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no schema can be made of the tool .*no docstring"):
        render_chat(QWEN3, [USER], tools=[lambda x: x])
    with pytest.raises(ValueError, match="a tool is 5; it must be a JSON schema or a function"):
        render_chat(QWEN3, [USER], tools=[5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="tools are 5; they must be a list"):
        render_chat(QWEN3, [USER], tools=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="enable_thinking is 'no'; it must be true, false or None"):
        render_chat(QWEN3, [USER], enable_thinking="no")  # pyright: ignore[reportArgumentType]


def test_dict_in_templates() -> None:
    assert render_chat("{{ dict(a=1) }}{{ dict.fromkeys('ab') }}", [USER]) == "{'a': 1}{'a': None, 'b': None}"


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nadd\n</think>\n\n4", False, ("add", "4")),
        ("\n <think>add</think>4 </think>", False, ("add", "4 </think>")),
        ("<think>\n\n</think>\n\n4", False, ("", "4")),
        ("<think>add and", False, ("add and", "")),
        ("add\n</think>\n\n4", False, ("add", "4")),
        ("add\n</think>\n\n4\n", True, ("add", "4\n")),
        ("<think>add</think>4", True, ("add", "4")),
        ("add and", True, ("add and", "")),
        (" 4 ", False, (None, " 4 ")),
        ("Use <think> marks</think>.", False, (None, "Use <think> marks</think>.")),
        ("", False, (None, "")),
    ],
)
def test_reasoning_is_split_off(text: str, opened: bool, expected: tuple[str | None, str]) -> None:
    assert split_reasoning(text, opened=opened) == expected


def test_prompts_that_open_a_block() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<think>\n\n</think>\n\n")
