"""Changes of what a recipe keeps in attributes and globals, in many kinds of Python object."""

from __future__ import annotations

from changes_code import TRAIN
from changes_objects import then
from rightness_changes import Change, Edit, Replace

USED = '        return fbank + MEL_OFFSET["low"] + torch.from_numpy(SILENCE)'
NAMESPACE = "from types import SimpleNamespace as S"


def held(name: str, was: str, now: str, use: str, words: str, *, before: str = "") -> Change:
    """Keep something in an attribute or a global, scale the energies by it, then change it.

    Args:
        name: says what is kept.
        was: the text that makes it, at first.
        now: the text that makes it after the change.
        use: the factor of the energies.
        words: name the cause.
        before: code before the class that the text needs, and which may hold `was`.
    """
    setup: list[Edit] = [Replace(TRAIN, USED, USED.replace("return ", f"return ({use}) * (") + ")")]
    if before:
        setup.append(Replace(TRAIN, "class Recogniser(", f"{before}\n\nclass Recogniser("))
    if was not in before:
        setup.append(then(was))
    return Change(
        name, "held", (Replace(TRAIN, was, now),), tuple(words.split()), setup=tuple(setup)
    )


CHANGES = [
    held(
        "a namespace",
        f"{NAMESPACE}; brain.conf = S(gain=1.1)",
        f"{NAMESPACE}; brain.conf = S(gain=1.3)",
        "self.conf.gain",
        "conf gain",
    ),
    held(
        "a nested dict",
        'brain.conf = {"mel": {"gain": [1.1]}}',
        'brain.conf = {"mel": {"gain": [1.3]}}',
        'self.conf["mel"]["gain"][0]',
        "conf gain",
    ),
    held(
        "a deque",
        "from collections import deque; brain.past = deque([1.1])",
        "from collections import deque; brain.past = deque([1.2])",
        "self.past[-1]",
        "past",
    ),
    held(
        "an array in a tuple",
        "brain.tables = (np.arange(3.0), 'x')",
        "brain.tables = (np.arange(3.0) + 1, 'x')",
        "self.tables[0][2]",
        "tables",
    ),
    held(
        "a data frame",
        "import pandas; brain.chart = pandas.DataFrame({'a': [1.5]})",
        "import pandas; brain.chart = pandas.DataFrame({'a': [1.7]})",
        "self.chart['a'][0]",
        "chart",
    ),
    held(
        "a sparse matrix",
        "from scipy.sparse import eye_array; brain.warp = eye_array(20)",
        "from scipy.sparse import eye_array; brain.warp = eye_array(20, k=1)",
        "torch.from_numpy(self.warp @ np.ones(20, 'f4'))",
        "warp",
    ),
    held(
        "an interpolation",
        "from scipy.interpolate import interp1d; brain.curve = interp1d([0, 9], [1, 2])",
        "from scipy.interpolate import interp1d; brain.curve = interp1d([0, 9], [1, 3])",
        "float(self.curve(3.0))",
        "curve",
    ),
    held(
        "a polynomial",
        "brain.poly = np.poly1d([1.0, 2.0])",
        "brain.poly = np.poly1d([1.0, 2.5])",
        "self.poly(0.5)",
        "poly",
    ),
    held(
        "modules in a list",
        "brain.layers = [torch.nn.Linear(20, 20).eval()]",
        "torch.manual_seed(99); brain.layers = [torch.nn.Linear(20, 20).eval()]",
        "self.layers[0](fbank)",
        "layers",
    ),
    held(
        "a module in an object",
        f"{NAMESPACE}; torch.manual_seed(1); brain.holder = S(net=torch.nn.Linear(20, 20))",
        f"{NAMESPACE}; torch.manual_seed(2); brain.holder = S(net=torch.nn.Linear(20, 20))",
        "self.holder.net(fbank)",
        "holder net",
    ),
    held(
        "an object with slots",
        "Slotted(1.1)",
        "Slotted(1.3)",
        "SLOTTED.gain",
        "SLOTTED gain",
        before="class Slotted:\n    __slots__ = ('gain',)\n\n    def __init__(self, gain):\n"
        "        self.gain = gain\n\n\nSLOTTED = Slotted(1.1)\n",
    ),
    held(
        "a property over a private attribute",
        "_gain = 1.1",
        "_gain = 1.2",
        "HOLDER.gain",
        "HOLDER Holder gain _gain",
        before="class Holder:\n    _gain = 1.1\n\n    @property\n    def gain(self):\n"
        "        return self._gain\n\n\nHOLDER = Holder()\n",
    ),
    held(
        "an object that answers __getattr__",
        "{'gain': 1.1}",
        "{'gain': 1.3}",
        "DYNAMIC.gain",
        "DYNAMIC values gain",
        before="class Dynamic:\n    def __init__(self, values):\n        self._values = values\n\n"
        "    def __getattr__(self, name):\n"
        "        return self.__dict__['_values'][name]\n\n\n"
        "DYNAMIC = Dynamic({'gain': 1.1})\n",
    ),
    held(
        "a mutable default",
        "cache=[1.1]",
        "cache=[1.3]",
        "with_default()",
        "with_default cache",
        before="def with_default(cache=[1.1]):\n    return cache[0]\n",
    ),
    held(
        "a default of a keyword",
        "level=1.1",
        "level=1.3",
        "with_keyword()",
        "with_keyword level",
        before="def with_keyword(*, level=1.1):\n    return level\n",
    ),
    held(
        "a closure in a closure",
        "inner(1.1)",
        "inner(1.3)",
        "NESTED()",
        "NESTED inner outer",
        before="def outer():\n    def inner(value):\n        def innermost():\n"
        "            return value\n\n        return innermost\n\n"
        "    return inner(1.1)\n\n\nNESTED = outer()\n",
    ),
    held(
        "a closure over a list",
        "levels = [1.1]",
        "levels = [1.3]",
        "LISTED()",
        "LISTED levels",
        before="def listed():\n    levels = [1.1]\n    return lambda: levels[0]\n\n\n"
        "LISTED = listed()\n",
    ),
    held(
        "single dispatch",
        "return 1.1  # tensors",
        "return 1.3  # tensors",
        "level_of(fbank)",
        "level_of",
        before="import functools\n\n\n@functools.singledispatch\ndef level_of(value):\n"
        "    return 1.0\n\n\n@level_of.register\ndef _(value: torch.Tensor):\n"
        "    return 1.1  # tensors\n",
    ),
    held(
        "a class method",
        "level = 1.1",
        "level = 1.3",
        "Levels.get()",
        "Levels level",
        before="class Levels:\n    level = 1.1\n\n    @classmethod\n    def get(cls):\n"
        "        return cls.level\n",
    ),
    held(
        "a generator",
        "yield 1.1",
        "yield 1.3",
        "sum(levels())",
        "levels",
        before="def levels():\n    yield 1.1\n    yield 0.2\n",
    ),
    held(
        "a function that is set by another",
        "helpers.configure(1.1)",
        "helpers.configure(1.3)",
        "helpers.LEVEL",
        "LEVEL configure",
        before="helpers.LEVEL = 1.0\n"
        "helpers.configure = lambda level: setattr(helpers, 'LEVEL', level)\n",
    ),
    held(
        "a lambda in a dict of an object",
        "brain.ops = {'scale': lambda x: 1.1}",
        "brain.ops = {'scale': lambda x: 1.3}",
        "self.ops['scale'](fbank)",
        "ops scale",
    ),
    held(
        "a bound method of an object",
        f"{NAMESPACE}; brain.call = {{'a': 1.1}}.get",
        f"{NAMESPACE}; brain.call = {{'a': 1.3}}.get",
        "self.call('a')",
        "call",
    ),
    held(
        "a method looked up by name",
        "return 1.1  # named",
        "return 1.3  # named",
        "getattr(Named(), 'level' + '_of')()",
        "Named level_of",
        before="class Named:\n    def level_of(self):\n        return 1.1  # named\n",
    ),
    held(
        "an instance of a class in a registry",
        "return 1.1  # registered",
        "return 1.3  # registered",
        "REGISTRY['a']()()",
        "REGISTRY A",
        before="REGISTRY = {}\n\n\nclass Registered:\n    def __init_subclass__(cls):\n"
        "        REGISTRY[cls.__name__.lower()] = cls\n\n\nclass A(Registered):\n"
        "    def __call__(self):\n        return 1.1  # registered\n",
    ),
    held(
        "a mask drawn with a seed",
        "torch.manual_seed(21); brain.mask = torch.rand(20)",
        "torch.manual_seed(22); brain.mask = torch.rand(20)",
        "self.mask",
        "mask",
    ),
    held(
        "a random scale of each utterance",
        "torch.manual_seed(31)",
        "torch.manual_seed(32)",
        "1 + torch.rand(())",
        "seed random",
    ),
    held(
        "a scripted module",
        "torch.jit.script(torch.nn.Threshold(0.5, 0.0))",
        "torch.jit.script(torch.nn.Threshold(0.6, 0.0))",
        "SCRIPTED(fbank)",
        "SCRIPTED threshold",
        before="SCRIPTED = torch.jit.script(torch.nn.Threshold(0.5, 0.0))\n",
    ),
    held(
        "a distribution",
        "brain.prior = torch.distributions.Normal(1.0, 2.0)",
        "brain.prior = torch.distributions.Normal(1.0, 3.0)",
        "self.prior.log_prob(fbank)",
        "prior scale",
    ),
    held(
        "a pipeline of scikit-learn",
        "brain.pipe = make(0.5)",
        "brain.pipe = make(0.7)",
        "torch.from_numpy(self.pipe.transform(fbank.numpy()))",
        "pipe n_quantiles mean_ scale_ scale steps make",
        before="def make(level):\n    from sklearn.pipeline import make_pipeline\n"
        "    from sklearn.preprocessing import MinMaxScaler, StandardScaler\n\n"
        "    data = np.linspace(0, level, 60).reshape(3, 20).astype('f4')\n"
        "    return make_pipeline(StandardScaler(), MinMaxScaler()).fit(data)\n",
    ),
]
