"""Text that must match a pattern or a JSON schema, with the log-probability of every token.

With a chat model (a GGUF file, a folder or a hub id), the answers make sense too:
python examples/structured_output.py --model SmolLM2-135M-Instruct.Q4_1.gguf
"""

import argparse
import json
from pathlib import Path

import calotype

SCHEMA = {
    "type": "object",
    "properties": {"object": {"enum": ["fox", "cat", "bee"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["object", "count"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    parser.add_argument("--model", help="a language model; without it, the bundled one")
    options = parser.parse_args()

    model = calotype.load_language_model(options.model)
    colour = model.generate("a fox on a", regex="(red|green|blue) background", logprobs=3, max_tokens=20)
    print("a fox on a " + colour.text.strip())
    for choice in colour.logprobs or ():
        print(f"  {model.tokenizer.decode([choice.token_id])!r:<14} log-probability {choice.logprob:.2f}")

    answer = model.generate("two cats:", json_schema=SCHEMA, max_tokens=40)
    print(json.loads(answer.text))
    (options.output / "answer.json").write_text(answer.text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
