"""Changes of objects of other libraries that a recipe keeps, as these libraries make them."""

from __future__ import annotations

from changes_held import held

WHISPER = (
    "from transformers import WhisperFeatureExtractor as W; "
    "brain.mel = W(feature_size=20, sampling_rate=8000, hop_length=80, n_fft=256"
)
PROCESSOR = (
    "from transformers import Wav2Vec2FeatureExtractor as E; brain.extractor = E(do_normalize={}, "
    "padding_value=0.5)"
)
MIXTURE = (
    "from sklearn.mixture import GaussianMixture as G; brain.gmm = G(2, random_state=0).fit("
    "np.random.default_rng({}).normal(0, 2, (90, 20)))"
)
NEIGHBOURS = (
    "from sklearn.neighbors import KNeighborsRegressor as N; brain.knn = N({}).fit("
    "np.arange(60.0).reshape(3, 20), [1.0, 1.5, 4.0])"
)
SPEECHBRAIN_KMEANS = (
    "from speechbrain.integrations.audio_tokenizers.kmeans import MiniBatchKMeansSklearn as K; "
    "brain.clusters = K(4, n_init=1, random_state=0); "
    "brain.clusters.partial_fit(torch.linspace(0, {}, 400).reshape(20, 20))"
)
KALDI = (
    "from functools import partial; from torchaudio.compliance.kaldi import get_mel_banks; "
    "brain.banks = partial(get_mel_banks, 20, 128, 8000.0, {}, 3800.0, 100.0, -500.0, 1.0)"
)
ENCODER = (
    "from speechbrain.dataio.encoder import CategoricalEncoder as C; brain.names = C(); "
    "brain.names.update_from_iterable({})"
)
GENERATED = "brain.mask = torch.rand(20, generator=torch.Generator().manual_seed({}))"
QUANTISED = (
    "torch.manual_seed(5); brain.layer = torch.ao.quantization.quantize_dynamic("
    "torch.nn.Sequential(torch.nn.Linear(20, 20)), dtype=torch.{})"
)
TRACED = (
    "torch.manual_seed(5); brain.graph = torch.fx.symbolic_trace("
    "torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.{}()))"
)

CHANGES = [
    held(
        "an array in Whisper's extractor",
        f"{WHISPER}); brain.mel.mel_filters[:] = 0.5",
        f"{WHISPER}); brain.mel.mel_filters[:] = 0.7",
        "self.mel.mel_filters[0, 0]",
        "mel mel_filters",
    ),
    held(
        "a number in Whisper's extractor",
        f"{WHISPER}, dither=0.5)",
        f"{WHISPER}, dither=0.6)",
        "self.mel.dither",
        "mel dither",
    ),
    held(
        "a flag of an extractor",
        PROCESSOR.format("True"),
        PROCESSOR.format("False"),
        "torch.from_numpy(self.extractor(fbank[:, 0].numpy(), sampling_rate=16000, "
        "return_tensors='np').input_values[0])[:, None]",
        "extractor do_normalize",
    ),
    held(
        "a mixture of Gaussians",
        MIXTURE.format(0),
        MIXTURE.format(1),
        "torch.from_numpy(self.gmm.score_samples(fbank.numpy()))[:, None]",
        "gmm means_ covariances_",
    ),
    held(
        "the number of neighbours",
        NEIGHBOURS.format(1),
        NEIGHBOURS.format(2),
        "torch.from_numpy(self.knn.predict(fbank.numpy()))[:, None]",
        "knn n_neighbors",
    ),
    held(
        "SpeechBrain's k-means",
        SPEECHBRAIN_KMEANS.format(2),
        SPEECHBRAIN_KMEANS.format(9),
        "(1 + self.clusters(fbank[None].contiguous())[0]).reshape(-1, 1)",
        "clusters cluster_centers",
    ),
    held(
        "SpeechBrain's encoder of categories",
        ENCODER.format("['a', 'b']"),
        ENCODER.format("['b', 'a']"),
        "2 + self.names.encode_label('a')",
        "names lab2ind",
    ),
    held(
        "a partial of torchaudio",
        KALDI.format("20.0"),
        KALDI.format("200.0"),
        "self.banks()[0].sum(dim=1)",
        "banks",
    ),
    held(
        "a transform of torchaudio",
        "import torchaudio; brain.db = torchaudio.transforms.AmplitudeToDB('power', 20.0)",
        "import torchaudio; brain.db = torchaudio.transforms.AmplitudeToDB('power', 5.0)",
        "self.db(fbank)",
        "db top_db",
    ),
    held(
        "a resampler of torchaudio",
        "import torchaudio; brain.resample = torchaudio.transforms.Resample(4, 4)",
        "import torchaudio; brain.resample = torchaudio.transforms.Resample(8, 4)",
        "self.resample(fbank[:, :2]).sum(dim=1, keepdim=True)",
        "resample orig_freq",
    ),
    held(
        "a configuration of OmegaConf",
        "from omegaconf import OmegaConf; brain.conf = OmegaConf.create({'mel': {'gain': 1.1}})",
        "from omegaconf import OmegaConf; brain.conf = OmegaConf.create({'mel': {'gain': 1.3}})",
        "self.conf.mel.gain",
        "conf gain",
    ),
    held(
        "a filter of SciPy",
        "from scipy import signal; brain.sos = signal.butter(2, 0.3, output='sos')",
        "from scipy import signal; brain.sos = signal.butter(2, 0.5, output='sos')",
        "float(self.sos[0, 0])",
        "sos",
    ),
    held(
        "a frozen distribution of SciPy",
        "from scipy.stats import norm; brain.norm = norm(0, 1)",
        "from scipy.stats import norm; brain.norm = norm(0, 2)",
        "self.norm.cdf(0.5)",
        "norm scale",
    ),
    held(
        "a spline of SciPy",
        "from scipy.interpolate import CubicSpline; brain.spline = CubicSpline([0, 1, 2], "
        "[1, 2, 4])",
        "from scipy.interpolate import CubicSpline; brain.spline = CubicSpline([0, 1, 2], "
        "[1, 3, 4])",
        "float(self.spline(0.5))",
        "spline",
    ),
    held("a mask of a generator", GENERATED.format(3), GENERATED.format(4), "self.mask", "mask"),
    held(
        "a random generator of NumPy, drawn from while computing",
        "brain.rng = np.random.default_rng(1)",
        "brain.rng = np.random.default_rng(2)",
        "self.rng.uniform(1, 2)",
        "rng random seed",
    ),
    held(
        "a random generator of Python, drawn from while computing",
        "import random; brain.draws = random.Random(1)",
        "import random; brain.draws = random.Random(2)",
        "self.draws.uniform(1, 2)",
        "draws random seed",
    ),
    held(
        "a quantised module",
        QUANTISED.format("qint8"),
        QUANTISED.format("float16"),
        "self.layer(fbank)",
        "layer dtype Linear",
    ),
    held(
        "a traced module",
        TRACED.format("ReLU"),
        TRACED.format("Tanh"),
        "self.graph(fbank)",
        "graph ReLU Tanh",
    ),
    held(
        "a vocabulary of SpeechBrain's normalisation",
        "from speechbrain.processing.features import InputNormalization as I; "
        "brain.norm = I(norm_type='global'); brain.norm.glob_std = torch.ones(20)",
        "from speechbrain.processing.features import InputNormalization as I; "
        "brain.norm = I(norm_type='global'); brain.norm.glob_std = torch.ones(20) * 2",
        "self.norm.glob_std",
        "norm glob_std",
    ),
]
