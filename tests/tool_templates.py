"""Chat templates in short, each with the marks and the form of calls that its family's has.

The forms are those of the published templates: NousResearch/Hermes-2-Pro and Qwen2.5,
Qwen3-Coder-30B-A3B-Instruct, GLM-4.5 and GLM-4.7, Mistral-Nemo-Instruct-2407,
Mistral-Small-3.1-24B-Instruct-2503, Ministral 3, and Llama-3.1-8B-Instruct.
"""

from __future__ import annotations

from typing import Any

_TOLD = "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %} "
_MESSAGES = (
    "<|end|>{% endif %}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
)
_REST = "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_VALUE = "{{ v if v is string else v | tojson }}"


def _template(told: str, call: str) -> str:
    return f"{_TOLD}{told}{_MESSAGES}{call}{_REST}"


_HERMES_CALL = '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_LISTED = (
    '{{ "" if loop.first else ", " }}{{ (f | tojson)[:-1] }}, "id": "{{ call.id[-9:] }}"}'
    "{{ ']' if loop.last else '' }}"
)
TEMPLATES = {
    "hermes": _template(
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
        f"{_HERMES_CALL}\n</tool_call>",
    ),
    "qwen-escaped": _template(
        '{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n" }}',
        f"{_HERMES_CALL}\n</tool_call>",
    ),
    "qwen-coder": _template(
        "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n"
        "</tool_call>",
        "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
        f"<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>\n{{% endfor %}}"
        "</function>\n</tool_call>",
    ),
    "glm-4.5": _template(
        "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}"
        f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n{{% endfor %}}"
        "</tool_call>",
    ),
    "glm-4.7": _template(
        "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>",
        "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}"
        f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{_VALUE}</arg_value>{{% endfor %}}"
        "</tool_call>",
    ),
    "mistral-nemo": _template(
        "[AVAILABLE_TOOLS]", "{{ '[TOOL_CALLS][' if loop.first else '' }}" + _LISTED
    ),
    "mistral-small": _template(
        "[AVAILABLE_TOOLS]", "{{ '[TOOL_CALLS] [' if loop.first else '' }}" + _LISTED
    ),
    "ministral": _template(
        "[AVAILABLE_TOOLS]", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"
    ),
    "llama": _template(
        'Respond in the format {"name": function name, "parameters": dictionary of arguments}.',
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    ),
}
# of families whose calls are not read back
OTHERS = {
    "gpt-oss": "{% if tools %}<|start|>functions<|channel|>commentary{% endif %}",
    "deepseek-v3": "{% if tools %}<\uff5ctool\u2581calls\u2581begin\uff5c>{% endif %}",
    "command-r": '{% if tools %}<|START_ACTION|>[{"tool_name": "", "parameters": {}}]{% endif %}',
    "gemma-4": "{% if tools %}<|tool_call>call:name{key:value}<tool_call|>{% endif %}",
    "a call of another kind": "{% if tools %}<tool_call>name(key=value)</tool_call>{% endif %}",
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["today", "tomorrow"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
