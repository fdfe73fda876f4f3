"""The card's goals against a report whose figures are known."""

from typing import Any

from training.goals import goal_table, goals


def make_report() -> dict[str, Any]:
    survival = {
        f"heldout_{domain}_survival_after": [0.01, 0.029, 0.02]
        for domain in ("stories", "templated")
    }
    return {
        "domains": {
            "stories": {"nats_per_token": 2.05, "stored_nats_per_token": 2.052},
            "templated": {"nats_per_token": 0.5, "stored_nats_per_token": 0.512},
        },
        "expert_load": [1.1, 1.7],
        "index_recall": {"2": 0.95, "4": 0.9},
        "answers": {
            "parsed": {"all": 0.96},
            "copied": {"all": 0.79},
            "tokens_per_round": {
                "structured": {"0.6": 5.5, "1": 4.7},
                "stories": {"0.6": 2.9, "1": 2.6},
            },
        },
        "calibration": {
            "coupled": survival,
            "rejection": survival | {"heldout_stories_survival_after": [0.031, 0.0, 0.0]},
        },
        "long_range": {"gap": 305.2, "ratio": 5.0},
    }


def test_each_goal_is_judged_by_its_own_figure() -> None:
    found = {goal.figure: goal for goal in goals(make_report(), 16_000_001, "quantised")}
    missed = {name for name, goal in found.items() if not goal.met}
    assert missed == {
        "loss by rounding, nats a token",
        "weights, MB",
        "most loaded expert over the mean",
        "values copied into them",
        "tokens a round, structured, temperature 1",
        "tokens a round, stories, temperature 1",
        "calibration error, worst slot, stories, rejection",
    }
    assert found["loss by rounding, nats a token"].reached == "0.0120"
    assert found["calibration error, worst slot, stories, rejection"].reached == "0.031"


def test_parts_that_were_not_measured_have_no_goal() -> None:
    report = make_report()
    for name in ("answers", "calibration", "long_range"):
        del report[name]
    table = goal_table(report, 15_000_000, "quantised")
    assert "tokens a round" not in table and "calibration" not in table
    assert "| weights, MB | <= 16.0 | 15.0 | met |" in table


def test_each_form_has_its_own_size() -> None:
    for size, verdict in ((40_000_000, "met"), (40_000_001, "**missed**")):
        assert f"| weights, MB | <= 40.0 | 40.0 | {verdict} |" in goal_table(
            make_report(), size, "float"
        )
