"""Makes the page of `jsparse inspect`: layers by position, and the text as a layer sees it."""

import base64

import numpy as np

from jsparse.evaluation.inspection import Inspection
from jsparse.evaluation.report.pages import fill
from jsparse.text.short_names import short_name

ATTENDED, LEVELS = 128, 127


def page(shown: Inspection) -> str:
    """Returns the page, which is self-contained.

    A cell is a byte: its highest bit is whether a head attends to a token, the others are the root
    of the weight, in 127 levels.
    """
    levels = np.rint(LEVELS * np.sqrt(shown.weights.clip(0, 1))).astype(np.uint8)
    cells = levels | np.where(shown.attended, ATTENDED, 0).astype(np.uint8)
    layers, heads, _ = cells.shape
    return fill(
        "inspect",
        {
            "model": shown.model,
            "policy": short_name(shown.policy),
            "tokens": shown.tokens,
            "prompt_tokens": shown.prompt_tokens,
            "next_token": shown.next_token,
            "layers": layers,
            "heads": heads,
            "fell_back": shown.fell_back,
            "told": shown.description,
            "cells": base64.b64encode(cells.tobytes()).decode("ascii"),
        },
    )
