"""Questions of a user, and a function that writes them to a file."""

ROWS = [
    {"id": "sum", "question": "the cat sat on the mat", "answer": 42, "source": "made up"},
    {"question": "the dog", "answer": " $\\frac{1}{2}$ "},
    {"id": 7, "question": "the house is red", "answer": "1,000"},
]


def written(folder, *lines):
    """Writes these lines to questions.jsonl; returns the folder."""
    file = folder / "questions.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder
