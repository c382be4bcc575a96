"""The bundled language model, which also reads the prompts of the picture model, as a writer of prompts."""

import argparse
from pathlib import Path

import calotype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    folder = parser.parse_args().output

    model = calotype.load_language_model()
    print("a cat on" + model.generate("a cat on", max_tokens=12).text)

    lines: list[str] = []
    for seed in range(3):
        expansion = model.expand("fox", max_tokens=24, temperature=1.0, seed=seed)
        lines.append(expansion.text.strip())
        print(f"fox -> {lines[-1]}  ({expansion.timings.first_token_seconds * 1000:.0f} ms to the first token)")
    (folder / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
