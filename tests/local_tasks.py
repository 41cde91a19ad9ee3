"""Tasks of lm-eval from files of this machine."""

import json

QUESTIONS = [
    {"question": "the quick brown", "choices": ["fox", "lazy dog", "a"], "answer": 0},
    {"question": "a happy", "choices": ["cat jumps", "over", "runs over the"], "answer": 1},
    {"question": "red", "choices": ["dog", "cat", "slow fox"], "answer": 2},
    {"question": "the lazy happy slow dog", "choices": ["jumps", "runs", "the"], "answer": 1},
]


def write_tasks(folder, *names):
    """Write a folder with a task of QUESTIONS under each of these names, and return it."""
    folder.mkdir()
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name in names:
        (folder / f"{name}.yaml").write_text(
            f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "questions.jsonl"}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 3.0}}
"""
        )
    return folder
