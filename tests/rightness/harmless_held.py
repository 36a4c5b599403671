"""Objects that differ from run to run, or are made in another way, with the same features."""

from __future__ import annotations

from changes_code import TRAIN
from changes_data import rename
from changes_held import NAMESPACE, USED
from changes_objects import then
from rightness_changes import Change, Do, Edit, Environ, Expected, Replace, Run

AGAIN = Run(new_interpreter=True)
OTHER_HASHES = (Environ("PYTHONHASHSEED", "99"), AGAIN)


def again(
    name: str,
    line: str,
    use: str,
    *edits: Edit,
    before: str = "",
    expected: Expected = "clear",
) -> Change:
    """Run a recipe that keeps something once more, after edits or none."""
    setup: list[Edit] = [Replace(TRAIN, USED, USED.replace("return ", f"return ({use}) * (") + ")")]
    if before:
        setup.append(Replace(TRAIN, "class Recogniser(", f"{before}\n\nclass Recogniser("))
    if line:
        setup.append(then(line))
    return Change(name, "harmless held", edits, (), expected, setup=tuple(setup))


def remade(name: str, was: str, now: str, use: str, expected: Expected = "clear") -> Change:
    """Make the same value in another way."""
    return again(name, was, use, Replace(TRAIN, was, now), expected=expected)


MEMO = """class Memo:
    def __init__(self):
        self.seen = {}
        self.calls = 0

    def __call__(self, size):
        self.calls += 1
        if size not in self.seen:
            self.seen[size] = 1.0 + size / 100
        return self.seen[size]


MEMO = Memo()
MEMO(7)
"""
TIMED = """class Timed:
    def __init__(self):
        import time

        self.started, self.spent_s = time.time(), 0.0

    def __call__(self):
        import time

        self.spent_s += time.time() - self.started
        return 1.1


TIMED = Timed()
"""
LOCKED = """import threading


class Locked:
    def __init__(self):
        self.lock, self.gain = threading.Lock(), 1.1

    def __call__(self):
        with self.lock:
            return self.gain


LOCKED = Locked()
"""
COUNTED = """COUNT = 0


def counted():
    global COUNT
    COUNT += 1
    return 1.1


counted()
"""
LAST = """LAST = {"id": None, "times": []}


def noted(value):
    LAST["id"] = value
    LAST["times"].append(__import__("time").time())
    return 1.1


noted(__import__("time").time())
"""

RUN_AGAIN = [
    again("a memo that fills", "", "MEMO(len(fbank))", AGAIN, before=MEMO),
    again(
        "a memo that is warm",
        "MEMO(9)",
        "MEMO(len(fbank))",
        Replace(TRAIN, "MEMO(9)", "MEMO(12)"),
        before=MEMO,
    ),
    again("times of an object", "", "TIMED()", AGAIN, before=TIMED),
    again("a lock", "", "LOCKED()", before=LOCKED),
    again(
        "a global that counts",
        "",
        "counted()",
        Replace(TRAIN, "counted()\n\n\n", "counted()\ncounted()\n\n\n"),
        before=COUNTED,
    ),
    again("a global that notes", "", "noted(len(fbank))", before=LAST),
    again(
        "an identifier of the run",
        f"import uuid; {NAMESPACE}; brain.run = S(id=uuid.uuid4(), gain=1.1)",
        "self.run.gain",
        expected="arguable",
    ),
    again(
        "the number of the process",
        f"{NAMESPACE}; brain.run = S(pid=os.getpid(), gain=1.1)",
        "self.run.gain",
        expected="arguable",
    ),
    again(
        "a temporary folder",
        f"import tempfile; {NAMESPACE}; brain.run = S(folder=tempfile.mkdtemp(), gain=1.1)",
        "self.run.gain",
    ),
    again(
        "a logger and an open file",
        f"{NAMESPACE}; brain.run = S(log=logging.getLogger('x'), file=open(os.devnull), gain=1.1)",
        "self.run.gain",
    ),
    again(
        "an object that knows its owner",
        f"{NAMESPACE}; brain.run = S(owner=brain, gain=1.1)",
        "self.run.gain",
    ),
    again(
        "an object shown by its address",
        f"{NAMESPACE}; brain.run = S(plain=object(), gain=1.1)",
        "self.run.gain",
        AGAIN,
    ),
    again(
        "a list that holds itself",
        "brain.ring = [1.1]; brain.ring.append(brain.ring)",
        "self.ring[0]",
    ),
    again(
        "a weak reference",
        "import weakref; brain.limit_of = weakref.ref(brain.limiter)",
        "1 + (self.limit_of() is None)",
    ),
    again(
        "a set of texts under another hash seed",
        "brain.names = {'a', 'b', 'c', 'd', 'e'}",
        "len(self.names)",
        *OTHER_HASHES,
    ),
    again(
        "frozen sets in a dict under another hash seed",
        "brain.names = {frozenset({'a', 'bc', 'def'}): 1.1}",
        "max(self.names.values())",
        *OTHER_HASHES,
    ),
    again(
        "a default set of a function under another hash seed",
        "",
        "counts()",
        *OTHER_HASHES,
        before="def counts(names=frozenset({'a', 'bc', 'def'})):\n    return len(names)\n",
    ),
    again(
        "a constant set in code under another hash seed",
        "",
        "inside('a')",
        *OTHER_HASHES,
        before="def inside(name):\n    return 1.1 if name in {'a', 'bc', 'def', 'x'} else 1.0\n",
    ),
    again(
        "a path of the moved data",
        "brain.place = Path(hparams['data_folder'])",
        "1 + len(self.place.suffix)",
        Do(rename, ("data", "moved")),
        Run(data="moved"),
    ),
    again(
        "a path in a dict with the moved data",
        "brain.places = {'data': hparams['data_folder'], 'gain': 1.1}",
        "self.places['gain']",
        Do(rename, ("data", "moved")),
        Run(data="moved"),
    ),
    again(
        "a mapped array of the moved data",
        "brain.map = np.load(hparams['data_folder'] + '/codebook.npy', mmap_mode='r')",
        "float(self.map[0, 0])",
        Do(rename, ("data", "moved")),
        Run(data="moved"),
    ),
]

REMADE = [
    remade(
        "an array in the order of columns",
        "brain.table = np.ones((3, 20))",
        "brain.table = np.asfortranarray(np.ones((3, 20)))",
        "torch.from_numpy(self.table[1])",
    ),
    remade(
        "an array mapped for one in memory",
        "brain.book = np.load(hparams['quantiser'].path)",
        "brain.book = np.load(hparams['quantiser'].path, mmap_mode='r')",
        "float(self.book[0, 0])",
    ),
    remade(
        "a tensor that wants gradients",
        "brain.scale = torch.ones(20) * 3",
        "brain.scale = (torch.ones(20) * 3).requires_grad_()",
        "self.scale.detach()",
    ),
    remade(
        "a tensor that is a view",
        "brain.scale = torch.ones(20)",
        "brain.scale = torch.ones(2, 40)[1, ::2]",
        "self.scale",
    ),
    remade(
        "another order of a dict",
        "brain.conf = {'a': 1.1, 'b': 2}",
        "brain.conf = {'b': 2, 'a': 1.1}",
        "self.conf['a']",
    ),
    remade(
        "a dict made by dict()",
        "brain.conf = {'a': 1.1, 'b': 2}",
        "brain.conf = dict(a=1.1, b=2)",
        "self.conf['a']",
    ),
    remade(
        "an attribute set by setattr",
        "brain.half = 0.5",
        "setattr(brain, 'half', 0.5)",
        "self.half",
    ),
    remade(
        "a buffer that was saved",
        "brain.scale = torch.arange(20.0)",
        "torch.save(torch.arange(20.0), 'scale.pt'); brain.scale = torch.load('scale.pt')",
        "self.scale",
    ),
    remade(
        "an object that was pickled",
        f"{NAMESPACE}; brain.conf = S(gain=1.1)",
        f"{NAMESPACE}; import pickle; brain.conf = pickle.loads(pickle.dumps(S(gain=1.1)))",
        "self.conf.gain",
    ),
    remade(
        "a deep copy",
        "brain.frontend = brain.frontend",
        "import copy; brain.frontend = copy.deepcopy(brain.frontend)",
        "1",
    ),
    remade(
        "a list for a tuple",
        "brain.levels = (1.1, 2.0)",
        "brain.levels = [1.1, 2.0]",
        "self.levels[0]",
        "arguable",
    ),
    remade(
        "a whole number for a broken one",
        "brain.level = 2.0",
        "brain.level = 2",
        "self.level",
        "arguable",
    ),
    remade(
        "a number of NumPy",
        "brain.level = 2.0",
        "brain.level = np.float64(2.0)",
        "self.level",
        "arguable",
    ),
]

CHANGES = RUN_AGAIN + REMADE
