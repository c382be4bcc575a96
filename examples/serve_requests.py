"""Many requests through one model: they join and leave while others decode, over one pool of key/value blocks.

Each gets the tokens that it would get alone. With another model: --model FILE.gguf
"""

import argparse
from pathlib import Path

import calotype
from calotype.language.sampling import Choice, Chooser, Sampling
from calotype.language.scheduler import Scheduler, Ticket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="FOLDER", help="where the files go")
    parser.add_argument("--model", help="a language model; without it, the bundled one")
    options = parser.parse_args()

    text = calotype.load_language_model(options.model)
    scheduler = Scheduler[Choice](text.language_model, max_rows=3, num_blocks=24, block_size=4)
    prompts = ["a fox", "two cats on", "a small bee at night and", "a red car", "an apple left of", "three"]
    asked: dict[Ticket, str] = {}
    for seed, prompt in enumerate(prompts):
        ids = text.tokenizer.encode(prompt)
        sampling = Sampling(max_tokens=6 + seed, temperature=0.8, seed=seed)
        chooser = Chooser(sampling, ids, banned=text.banned)
        asked[scheduler.submit(ids, chooser, max_tokens=sampling.max_tokens, stop_tokens=text.tokenizer.eos)] = prompt

    tokens: dict[Ticket, list[int]] = {ticket: [] for ticket in asked}
    steps = 0
    while scheduler.num_running or scheduler.num_waiting:
        steps += 1
        for event in scheduler.step():
            if event.chosen is not None:
                tokens[event.ticket].append(event.chosen.token_id)
            if event.finish_reason is not None:
                running, waiting = scheduler.num_running, scheduler.num_waiting
                print(f"step {steps:2}: {asked[event.ticket]!r} ends; {running} running, {waiting} waiting")

    lines = [f"{asked[ticket]} ...{text.tokenizer.decode(ids)}" for ticket, ids in tokens.items()]
    (options.output / "answers.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
