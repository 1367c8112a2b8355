"""Chat templates that write what the published ones of well-known families write; our own words, the same text.

Each is (Jinja source, BOS, EOS). What is peculiar to a family is said beside it.
"""

from __future__ import annotations

ASK = "{% if add_generation_prompt %}"

# A default system message stands in front of a conversation that brings none.
CHATML = (
    "{%- if messages[0].role != 'system' -%}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    + ASK
    + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Answers of tools stand in one user turn, as many as follow each other.
QWEN25 = (
    "{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' -}}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- else -%}{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
    + ASK
    + "{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# Reasoning is left out of the history, but not after the last question, where an empty one is put in.
QWEN3 = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}"
    "{%- for m in messages -%}{%- set text = m.content -%}{%- set thought = '' -%}"
    "{%- if m.role == 'assistant' and '</think>' in text -%}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{{- '<|im_start|>' ~ m.role ~ '\n' -}}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) -%}"
    "{{- '<think>\n' ~ thought ~ '\n</think>\n\n' -}}{%- endif -%}"
    "{{- text ~ '<|im_end|>\n' -}}{%- endfor -%}" + ASK + "{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# The system message is folded into the first user turn; every exchange has a BOS of its own; contents are stripped.
LLAMA2 = (
    "{%- if messages[0].role == 'system' -%}{%- set turns = messages[1:] -%}"
    "{%- set head = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' -%}"
    "{%- else -%}{%- set turns = messages -%}{%- set head = '' -%}{%- endif -%}"
    "{%- for m in turns -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{%- endif -%}"
    "{%- set text = head ~ m.content if loop.first else m.content -%}"
    "{%- if m.role == 'user' -%}{{ bos_token ~ '[INST] ' ~ text.strip() ~ ' [/INST]' }}"
    "{%- elif m.role == 'assistant' -%}{{ ' ' ~ text.strip() ~ ' ' ~ eos_token }}"
    "{%- else -%}{{ raise_exception('only user and assistant') }}{%- endif -%}{%- endfor -%}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ (m.content | trim)"
    " ~ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = bos_token ~ text %}{% endif %}{{ text }}{% endfor %}"
    + ASK
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# A system text that is always there goes on with the user's own system message; the date is in it.
LLAMA31 = (
    "{{- bos_token -}}{%- if messages[0].role == 'system' -%}"
    "{%- set own = messages[0].content | trim -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set own = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n'"
    " ~ 'Today Date: 26 Jul 2024\n\n' ~ own ~ '<|eot_id|>' -}}"
    "{%- for m in turns -%}{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ (m.content | trim) ~"
    " '<|eot_id|>' -}}{%- endfor -%}"
    + ASK
    + "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"
)
# No system message at all, and a blank before every answer of the history.
MISTRAL1 = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content ~ eos_token ~ ' ' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# The system message is folded into the *last* user turn: it moves when the conversation goes on.
MISTRAL3 = (
    "{%- if messages[0].role == 'system' -%}{%- set sys = messages[0].content -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set turns = messages -%}{%- endif -%}{{- bos_token -}}"
    "{%- for m in turns -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('roles must alternate user/assistant/user/assistant') -}}{%- endif -%}"
    "{%- if m.role == 'user' -%}{%- if loop.last and sys is defined -%}"
    "{{- '[INST] ' ~ sys ~ '\n\n' ~ m.content ~ '[/INST]' -}}"
    "{%- else -%}{{- '[INST] ' ~ m.content ~ '[/INST]' -}}{%- endif -%}"
    "{%- elif m.role == 'assistant' -%}{{- ' ' ~ (m.content | trim) ~ eos_token -}}"
    "{%- else -%}{{- raise_exception('only user and assistant') -}}{%- endif -%}{%- endfor -%}"
)
# No system role; the assistant is called model.
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{% endif %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' ~ role ~ '\n' ~ (m.content | trim) ~ '<end_of_turn>\n' }}{% endfor %}"
    + ASK
    + "{{ '<start_of_turn>model\n' }}{% endif %}"
)
# As before, with the system message in front of the first question.
GEMMA3 = (
    "{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- set head = messages[0].content ~ '\n\n' -%}"
    "{%- set turns = messages[1:] -%}{%- else -%}{%- set head = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for m in turns -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{%- endif -%}"
    "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (head if loop.first else '') }}"
    "{{ m.content | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    + ASK
    + "{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
# The end of the text is marked unless an answer is asked for.
PHI3 = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{% endif %}{% endfor %}"
    + ASK
    + "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ eos_token ~ '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
# Plain words instead of special tokens, and a system text that is there by default.
VICUNA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}{% set head = messages[0].content %}"
    "{% else %}{% set turns = messages %}{% set head = 'A chat between a user and an assistant.' %}{% endif %}"
    "{{ head ~ ' ' }}{% for m in turns %}{% if m.role == 'user' %}{{ 'USER: ' ~ m.content ~ ' ' }}"
    "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' ~ m.content ~ eos_token }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    + ASK
    + "{{ 'ASSISTANT:' }}{% endif %}"
)
# The system text has no markers at all, wherever it stands in the conversation; the question to think is in the prompt only.
DEEPSEEK_R1 = (
    "{%- set ns = namespace(sys='') -%}{%- for m in messages -%}{%- if m.role == 'system' -%}"
    "{%- set ns.sys = m.content -%}{%- endif -%}{%- endfor -%}{{ bos_token ~ ns.sys }}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<｜User｜>' ~ m.content }}"
    "{%- elif m.role == 'assistant' -%}"
    "{{ '<｜Assistant｜>' ~ m.content.split('</think>')[-1] ~ '<｜end▁of▁sentence｜>' }}{%- endif -%}{%- endfor -%}"
    + ASK
    + "{{ '<｜Assistant｜><think>\n' }}{%- endif -%}"
)
COMMAND_R = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
    "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' ~ messages[0].content ~ '<|END_OF_TURN_TOKEN|>' }}"
    "{% else %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' ~ m.content.strip() ~ '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' ~ m.content.strip() ~ '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    + ASK
    + "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
GRANITE = (
    "{%- for m in messages -%}{{- '<|start_of_role|>' ~ m.role ~ '<|end_of_role|>' ~ m.content ~ '<|end_of_text|>\n' -}}"
    "{%- endfor -%}" + ASK + "{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}"
)
# No suffixes: a message ends where the next begins.
GLM4 = (
    "[gMASK]<sop>{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{%- endfor -%}"
    + ASK
    + "{{ '<|assistant|>\n' }}{%- endif -%}"
)

FAMILIES: dict[str, tuple[str, str, str]] = {
    "chatml": (CHATML, "", "<|im_end|>"),
    "qwen2.5": (QWEN25, "", "<|im_end|>"),
    "qwen3": (QWEN3, "", "<|im_end|>"),
    "llama-2": (LLAMA2, "<s>", "</s>"),
    "llama-3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "llama-3.1": (LLAMA31, "<|begin_of_text|>", "<|eot_id|>"),
    "mistral-1": (MISTRAL1, "<s>", "</s>"),
    "mistral-3": (MISTRAL3, "<s>", "</s>"),
    "gemma-2": (GEMMA2, "<bos>", "<eos>"),
    "gemma-3": (GEMMA3, "<bos>", "<eos>"),
    "phi-3": (PHI3, "<s>", "<|endoftext|>"),
    "zephyr": (ZEPHYR, "<s>", "</s>"),
    "vicuna": (VICUNA, "<s>", "</s>"),
    "deepseek-r1": (DEEPSEEK_R1, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "command-r": (COMMAND_R, "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "granite": (GRANITE, "", "<|end_of_text|>"),
    "glm-4": (GLM4, "", "<|endoftext|>"),
}
