"""Ask a server for greedy texts with OpenAI's client, and stop with an error if they are not the expected.

    python ask.py PORT MODEL ASK.json     # with vLLM's Python

ASK: {"prompts": token ids, "answers": token ids}. MODEL is the folder that is served.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openai
import transformers


def main(port: str, model: str, file: str) -> None:
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    for prompt, answer in zip(asked["prompts"], asked["answers"], strict=True):
        made = client.completions.create(
            model=model, prompt=prompt, max_tokens=len(answer), temperature=0, extra_body={"ignore_eos": True}
        )
        text, expected = made.choices[0].text.split(), tokenizer.decode(answer, skip_special_tokens=True).split()
        assert text == expected, f"the server wrote {text}, expected {expected}"
    sys.stdout.write(f"{len(asked['prompts'])} texts as expected\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
