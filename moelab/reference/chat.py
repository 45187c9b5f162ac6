r"""The chat template of the reference models: roles as the training text writes them.

A message is `<|role|> text` and a line feed; an answer begins after its role token and ends at the next one.
Reasoning is `<think>…</think>`, a tool call `<call>name(arguments)</call>`, each on a line of its own. This is
what `moelab.threads` writes message by message; here it is Jinja, for every other program that loads the
checkpoint. It asks for no date, and refuses a role it does not know.
"""

CHAT_TEMPLATE = r"""{%- if tools %}{{ '<|system|> ' + (tools | tojson) + '\n' }}{% endif -%}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{ raise_exception('unknown role: ' ~ message.role) }}
{%- endif -%}
{%- set parts = namespace(all=[]) -%}
{%- if message.reasoning_content -%}
{%- set parts.all = parts.all + ['<think>' + message.reasoning_content + '</think>'] -%}
{%- endif -%}
{%- if message.content -%}
{%- set parts.all = parts.all + [message.content] -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
{%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
{%- set parts.all = parts.all + ['<call>' + function.name + '(' + arguments + ')</call>'] -%}
{%- endfor -%}
{{ '<|' + message.role + '|> ' + parts.all | join('\n') + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
