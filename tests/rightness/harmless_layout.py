"""Changes of where code stands that do not matter: lines, order, files."""

from __future__ import annotations

from changes_code import BASE, FRONTEND, HELPERS, QUANTISE, TRAIN
from changes_plain import EXTRACT
from harmless_code import clear, code
from rightness_changes import Append, Move, Replace

CHANGES = [
    code(
        TRAIN,
        "            wav = GAIN * wav\n",
        "\n            wav = (\n                GAIN\n                * wav\n            )\n\n",
        "a line split over several",
    ),
    code(
        TRAIN,
        '            utterance = {"id": id}\n',
        "            utterance = {'id': id}\n",
        "single quotes",
    ),
    code(HELPERS, "EPSILON = 1e-3", "EPSILON = 0.001", "a constant written in another way"),
    code(
        HELPERS,
        "    return wav - coefficient * previous\n",
        "    return (wav - (coefficient * previous))\n",
        "parentheses",
    ),
    code(
        TRAIN,
        "import json\nimport logging\n",
        "import logging\nimport json\n",
        "another order of imports",
    ),
    code(TRAIN, "import os\n", "import os\nimport time\n", "an import that nothing needs"),
    code(TRAIN, "GAIN = 2.0\n", "\n\n\nGAIN = 2.0\n", "blank lines"),
    code(
        HELPERS,
        '"none": lambda values: values,',
        '"none": lambda values: values,  # as it is\n    "same": lambda values: values,',
        "an entry of a table that is not used",
    ),
    clear(
        "functions in another order",
        Replace(FRONTEND, "def smooth(frames):\n", "def smooth_(frames):\n"),
        Replace(
            FRONTEND,
            "@dataclass\n",
            'def smooth(frames):\n    """Average each frame with the one before."""\n'
            "    before = torch.roll(frames, 1, dims=0)\n"
            "    return 0.75 * frames + 0.25 * before\n\n\n@dataclass\n",
        ),
        Replace(
            FRONTEND,
            'def smooth_(frames):\n    """Average each frame with the one before."""\n'
            "    before = torch.roll(frames, 1, dims=0)\n"
            "    return 0.75 * frames + 0.25 * before\n\n\n",
            "",
        ),
    ),
    clear(
        "methods in another order",
        Replace(
            QUANTISE,
            "    def __call__(self, frames):\n"
            "        return self._distances(frames).argmin(dim=1)\n\n",
            "",
        ),
        Append(
            QUANTISE,
            "\n    def __call__(self, frames):\n"
            "        return self._distances(frames).argmin(dim=1)\n",
        ),
    ),
    clear(
        "a moved file",
        Move("lobes/layers.py", "lobes/scales.py"),
        Replace(BASE, "from .layers import", "from .scales import"),
    ),
    clear(
        "a moved file of the recipe",
        Move("textual.py", "letters.py"),
        Replace(EXTRACT, "from textual import", "from letters import"),
        recipe="plain",
    ),
    clear(
        "a file moved into a package",
        Move("corpus.py", "inputs/corpus.py"),
        Append("inputs/__init__.py", ""),
        Replace(EXTRACT, "from corpus import", "from inputs.corpus import"),
        recipe="plain",
    ),
    clear(
        "a helper moved to another file",
        Replace(
            FRONTEND,
            'def smooth(frames):\n    """Average each frame with the one before."""\n'
            "    before = torch.roll(frames, 1, dims=0)\n"
            "    return 0.75 * frames + 0.25 * before\n\n\n",
            "",
        ),
        Append(
            "lobes/smoothing.py",
            "import torch\n\n\ndef smooth(frames):\n"
            '    """Average each frame with the one before."""\n'
            "    before = torch.roll(frames, 1, dims=0)\n"
            "    return 0.75 * frames + 0.25 * before\n",
        ),
        Replace(TRAIN, "import Frontend, smooth, taper", "import Frontend, taper"),
        Replace(TRAIN, "from models", "from lobes.smoothing import smooth\nfrom models"),
    ),
]
