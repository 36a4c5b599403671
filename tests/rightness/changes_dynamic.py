"""Changes of code that is found only while it runs."""

from __future__ import annotations

from changes_code import HELPERS, TRAIN
from changes_data import rewrite_array, rewrite_json
from changes_held import USED, held
from changes_objects import then
from rightness_changes import Append, Change, Do, Replace

SCALED = "        fbank = fbank * {}\n" + USED
MUTUAL = """def even(count):
    return 1.0 if count == 0 else odd(count - 1)


def odd(count):
    return 1.1 if count == 0 else 0.5 + even(count - 1)
"""
CACHED = """from functools import cached_property


class Later:
    @cached_property
    def gain(self):
        return 1.1


LATER = Later()
"""
DESCRIPTOR = """class Gain:
    def __get__(self, instance, owner):
        return 1.1


class Described:
    gain = Gain()
"""
META = """class Meta(type):
    @property
    def gain(cls):
        return 1.1


class WithMeta(metaclass=Meta):
    pass
"""
ENTERED = """from contextlib import contextmanager


@contextmanager
def level():
    yield 1.1


def entered():
    with level() as gain:
        return gain
"""
MATCHED = """def matched(shape):
    match shape:
        case (_, 20):
            return 1.1
        case _:
            return 1.0
"""
MAKES = "Made = type('Made', (), {'gain': lambda self: 1.1})\n"
PLUGIN = "def gain(values):\n    return {}\n"


CODE = [
    held(
        "two functions that call each other",
        "return 1.1 if count",
        "return 1.3 if count",
        "even(3)",
        "odd",
        before=MUTUAL,
    ),
    held(
        "a cached property",
        "return 1.1",
        "return 1.3",
        "LATER.gain",
        "Later LATER gain",
        before=CACHED,
    ),
    held(
        "a descriptor",
        "return 1.1",
        "return 1.3",
        "Described().gain",
        "Gain Described",
        before=DESCRIPTOR,
    ),
    held(
        "a property of a metaclass",
        "return 1.1",
        "return 1.3",
        "WithMeta.gain",
        "Meta WithMeta",
        before=META,
    ),
    held(
        "a context manager", "yield 1.1", "yield 1.3", "entered()", "level entered", before=ENTERED
    ),
    held(
        "a match",
        "return 1.1",
        "return 1.3",
        "matched(tuple(fbank.shape))",
        "matched",
        before=MATCHED,
    ),
    held(
        "a class made by type", "self: 1.1", "self: 1.3", "Made().gain()", "Made gain", before=MAKES
    ),
    held(
        "code in a text",
        "CODE = '1.1'",
        "CODE = '1.3'",
        "eval(CODE)",
        "CODE",
        before="CODE = '1.1'\n",
    ),
    held(
        "code that is compiled",
        "exec('def compiled(): return 1.1')",
        "exec('def compiled(): return 1.3')",
        "compiled()",
        "compiled",
        before="exec('def compiled(): return 1.1')\n",
    ),
    held(
        "a global by its name",
        "LEVEL_A = 1.1",
        "LEVEL_A = 1.3",
        "globals()['LEVEL_' + 'A']",
        "LEVEL_A",
        before="LEVEL_A = 1.1\n",
    ),
    held(
        "a conditional definition",
        "    USE_NEW = False",
        "    USE_NEW = True",
        "chosen()",
        "chosen USE_NEW",
        before="if os.sep:\n    USE_NEW = False\nif USE_NEW:\n"
        "    def chosen():\n        return 1.3\n"
        "else:\n    def chosen():\n        return 1.1\n",
    ),
    held(
        "an operator of a class",
        "return 1.1 * other",
        "return 1.3 * other",
        "(Times() * fbank)",
        "Times",
        before="class Times:\n    def __mul__(self, other):\n        return 1.1 * other\n",
    ),
    held(
        "a number that is shadowed",
        "PI = 3.0",
        "from math import pi as PI",
        "PI",
        "PI pi",
        before="PI = 3.0\n",
    ),
    held(
        "a local import",
        "from math import floor as rounded",
        "from math import ceil as rounded",
        "1 + local(1.5)",
        "local",
        before="def local(value):\n    from math import floor as rounded\n\n"
        "    return rounded(value)\n",
    ),
]

FILES = [
    Change(
        "a module imported by its name",
        "held",
        (Replace("lobes/plugin.py", "1.1", "1.3"),),
        ("plugin", "gain"),
        setup=(
            Append("lobes/plugin.py", PLUGIN.format("1.1")),
            Replace(TRAIN, USED, SCALED.format("__import__('lobes.plugin').plugin.gain(fbank)")),
        ),
    ),
    Change(
        "a plugin that the YAML names",
        "held",
        (Replace("lobes/plugin.py", "1.1", "1.3"),),
        ("plugin", "gain"),
        setup=(
            Append("lobes/plugin.py", PLUGIN.format("1.1")),
            Replace("hparams.yaml", "experiment: first", "experiment: first\nplugin: lobes.plugin"),
            Replace(
                TRAIN,
                USED,
                SCALED.format(
                    "sys.modules['importlib'].import_module(self.hparams.plugin).gain(fbank)"
                ),
            ),
        ),
    ),
    Change(
        "an array that is read while computing",
        "held",
        (Do(rewrite_array, ("codebook.npy", "it[0, 0] += 0.5")),),
        ("codebook", "table_path"),
        setup=(
            Replace(TRAIN, USED, SCALED.format("float(np.load(self.table_path)[0, 0])")),
            then('brain.table_path = hparams["quantiser"].path'),
        ),
    ),
    Change(
        "a file of JSON that is read while computing",
        "held",
        (Do(rewrite_json, ("speakers.json", "it['zoe'] = 1.3")),),
        ("speakers", "zoe"),
        setup=(
            Replace(
                TRAIN,
                USED,
                SCALED.format("json.loads(Path(self.table_path).read_text()).get('zoe', 1.0)"),
            ),
            then('brain.table_path = hparams["data_folder"] + "/speakers.json"'),
        ),
    ),
    Change(
        "another order of base classes",
        "held",
        (Replace(TRAIN, "Mixin, FeatureBrain, Scaled,", "Mixin, Scaled, FeatureBrain,"),),
        ("share", "Recogniser", "Scaled"),
        setup=(
            Replace(
                TRAIN,
                "class Recogniser(featcache.FeatureCacheMixin, FeatureBrain, sb",
                "class Scaled:\n    share = 0.5\n\n\n"
                "class Recogniser(featcache.FeatureCacheMixin, FeatureBrain, Scaled, sb",
            ),
        ),
    ),
    Change(
        "a function that two files import",
        "held",
        (Replace(HELPERS, "    return 1.1 * values", "    return 1.3 * values"),),
        ("shared",),
        setup=(
            Append(HELPERS, "\n\ndef shared(values):\n    return 1.1 * values\n"),
            Append("lobes/again.py", "from helpers import shared\n"),
            Replace(TRAIN, "from models", "from lobes.again import shared\nfrom models"),
            Replace(TRAIN, USED, "        fbank = shared(fbank)\n" + USED),
        ),
    ),
    Change(
        "an import that falls back",
        "held",
        (Append("fast_helpers.py", "def boost(values):\n    return 1.3 * values\n"),),
        ("boost", "fast_helpers"),
        setup=(
            Replace(
                TRAIN,
                "from models",
                "try:\n    from fast_helpers import boost\nexcept ImportError:\n"
                "    def boost(values):\n        return values\nfrom models",
            ),
            Replace(TRAIN, USED, "        fbank = boost(fbank)\n" + USED),
        ),
    ),
]

CHANGES = CODE + FILES
