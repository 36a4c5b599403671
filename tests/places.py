"""Where the project and its tests lie."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
REFERENCE = ROOT.parent / "shared" / "reference"  # files of other toolkits; not in the project
RECORDINGS = ROOT.parent / "shared" / "data" / "fsdd" / "recordings"  # real speech; not either
