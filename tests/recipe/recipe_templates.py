"""Chat templates in the habits of known model families, the later ones with tools and reasoning.

Written for these tests. Each does something that another does not: prints tools as
JSON or key by key, arguments as an object or as text, drops earlier reasoning,
opens the reasoning in the prompt, takes one call at a time.
"""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful model.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA3 = """{% set loop_messages = messages %}
{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' \
+ message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{ content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\
{% endif %}"""

QWEN = """{%- macro turn(role, text) -%}
<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro -%}
{%- set ns = namespace(last=messages|length - 1, seen=false) -%}
{%- for message in messages[::-1] if not ns.seen and message.role == 'user' -%}
{%- set ns.seen = true -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'assistant' -%}
{%- set reasoning = '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if reasoning and loop.last -%}
{{- turn('assistant', '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content) -}}
{%- else -%}
{{- turn('assistant', content) -}}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- turn('user', '<tool_response>\\n' ~ content ~ '\\n</tool_response>') -}}
{%- else -%}
{{- turn(message.role, content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
{%- set loop_messages = messages[1:] -%}
{%- else -%}
{%- set first_user_prefix = '' -%}
{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}
{{- message['content'] | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

ROLE_TOKENS = (  # the role is part of the control token
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

INST = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '[INST] ' ~ message['content'] ~ ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- endif %}{% endfor %}"""

QWEN3 = """{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- '# Functions\\n\\nYou may call these:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nWrite <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' -}}
{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) -%}
{%- for message in messages[::-1] -%}
{%- set index = (messages|length - 1) - loop.index0 -%}
{%- if ns.searching and message.role == 'user' and message.content is string
 and not (message.content.startswith('<tool_response>')
 and message.content.endswith('</tool_response>')) -%}
{%- set ns.searching = false -%}{%- set ns.last_query = index -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{%- set reasoning = '' -%}
{%- if message.reasoning_content is string -%}
{%- set reasoning = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last_query and (loop.last or reasoning) -%}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}
{{- content -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{%- set function = call.function if call.function else call -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{%- if function.arguments is string -%}{{- function.arguments -}}
{%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}"""

LLAMA31 = """{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] | trim -%}{%- set messages = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{%- if tools is not none -%}{{- 'Environment: ipython\\n' -}}{%- endif -%}
{{- system + '<|eot_id|>' -}}
{%- if tools is not none -%}
{%- if not messages -%}{{- raise_exception('No user turn for the tools') -}}{%- endif -%}
{%- set first = messages[0]['content'] | trim -%}{%- set messages = messages[1:] -%}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
{{- 'Call as {"name": name, "parameters": values} where it helps.\\n\\n' -}}
{%- for tool in tools -%}{{- tool | tojson(indent=4) -}}{{- '\\n\\n' -}}{%- endfor -%}
{{- first + '<|eot_id|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if 'tool_calls' in message -%}
{%- if message.tool_calls | length != 1 -%}
{{- raise_exception('This model takes single tool calls at once') -}}
{%- endif -%}
{%- set function = message.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{{- '{"name": "' + function.name + '", "parameters": ' -}}
{{- function.arguments | tojson -}}
{{- '}<|eot_id|>' -}}
{%- elif message.role == 'tool' or message.role == 'ipython' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' -}}
{%- if message.content is mapping
 or (message.content is iterable and message.content is not string) -%}
{{- message.content | tojson -}}
{%- else -%}
{{- message.content -}}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
{{- message['content'] | trim -}}
{{- '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}"""

# Reasons always: the prompt opens the block. Arguments are text; a turn of calls has no content.
R1 = """{%- set ns = namespace(system='', in_results=false) -%}
{%- for message in messages if message['role'] == 'system' -%}
{%- set ns.system = ns.system + ('' if loop.first else '\\n\\n') + message['content'] -%}
{%- endfor -%}
{{- bos_token + ns.system -}}
{%- if tools -%}
{{- '\\n\\n## Tools\\n' -}}
{%- for tool in tools -%}
{{- '### ' + tool.function.name + '\\n' + tool.function.description + '\\n' -}}
{{- tool.function.parameters | tojson + '\\n' -}}
{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
{%- if ns.in_results and message['role'] != 'tool' -%}
{{- '<｜tool▁outputs▁end｜>' -}}{%- set ns.in_results = false -%}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- elif message['role'] == 'assistant'
 and (message['content'] is not defined or message['content'] is none) -%}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' -}}
{%- for call in message['tool_calls'] -%}
{{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] -}}
{{- '\\n```json\\n' + call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' -}}
{%- elif message['role'] == 'assistant' -%}
{%- set content = message['content'] -%}
{%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' -}}
{%- elif message['role'] == 'tool' -%}
{%- if not ns.in_results -%}{{- '<｜tool▁outputs▁begin｜>' -}}{%- endif -%}
{%- set ns.in_results = true -%}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if ns.in_results -%}{{- '<｜tool▁outputs▁end｜>' -}}{%- endif -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}"""

# Tools and arguments key by key, names of results, and reasoning that is always kept.
XML = """{%- macro described(name, field) -%}
{{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' -}}
{%- for key, value in field | items -%}
{{- '\\n<' ~ key ~ '>' ~ (value if value is string else value | tojson) ~ '</' ~ key ~ '>' -}}
{%- endfor -%}
{{- '\\n</parameter>' -}}
{%- endmacro -%}
{%- if tools or messages[0].role == 'system' -%}
{{- '<|im_start|>system' -}}
{%- if messages[0].role == 'system' -%}{{- '\\n' + messages[0].content -}}{%- endif -%}
{%- for tool in tools or [] -%}
{{- '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>' -}}
{{- '\\n<description>' ~ (tool.function.description | trim) ~ '</description>' -}}
{%- for name, field in tool.function.parameters.properties | default({}) | items -%}
{{- described(name, field) -}}
{%- endfor -%}
{%- for key, value in tool.function.parameters | dictsort if key != 'properties' -%}
{{- '\\n<' ~ key ~ '>' ~ (value if value is string else value | tojson) ~ '</' ~ key ~ '>' -}}
{%- endfor -%}
{{- '\\n</function>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if message.thinking is defined -%}
{{- '<think>' ~ message.thinking ~ '</think>' -}}
{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls | default([]) -%}
{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' -}}
{%- for name, value in call.function.arguments | items -%}
{{- '<parameter=' ~ name ~ '>\\n' ~ (value if value is string else value | tojson) -}}
{{- '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response name=' ~ (message.name | default('?')) ~ '>' -}}
{{- message.content ~ '</tool_response><|im_end|>\\n' -}}
{%- elif message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if thinking is defined and thinking -%}
{{- '<think>' -}}
{%- if reasoning_effort is defined -%}{{- '[' ~ reasoning_effort ~ ']' -}}{%- endif -%}
{%- endif -%}
{%- endif -%}"""
