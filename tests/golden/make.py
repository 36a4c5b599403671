"""Writes the golden caches anew: `cd tests && python -m golden.make`. Never after version 0.2.0."""

from __future__ import annotations

import logging
import shutil

from golden_caches import (
    ANNOTATED,
    CHANGED,
    GOLDEN,
    LAYOUTS,
    make_annotated,
    make_changed,
    make_golden,
)

if __name__ == "__main__":
    logging.disable()  # of utterances that are stored twice, on purpose
    for layout, features in LAYOUTS.items():
        shutil.rmtree(GOLDEN / layout, ignore_errors=True)
        make_golden(GOLDEN / layout, features)
    shutil.rmtree(GOLDEN / CHANGED, ignore_errors=True)
    make_changed(GOLDEN / CHANGED)
    shutil.rmtree(GOLDEN / ANNOTATED, ignore_errors=True)
    make_annotated(GOLDEN / ANNOTATED)
