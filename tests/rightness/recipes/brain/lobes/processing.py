"""Inputs of encoders."""

import torch


class Processor:
    """Normalises a wave as the encoder expects it."""

    def __init__(self, do_normalize=True, padding_value=0.0, mean=(0.0,), std=(1.0,)):
        self.do_normalize = do_normalize
        self.padding_value = padding_value
        self.mean = list(mean)
        self.std = list(std)
        self.options = {"epsilon": 1e-3, "dither": {"amount": 0.0, "kind": "none"}}

    def __call__(self, wav):
        if self.do_normalize:
            spread = wav.std() + self.options["epsilon"]
            wav = (wav - wav.mean()) / spread
        return (wav - self.mean[0]) * self.std[0] + self._dither(wav)

    def _dither(self, wav):
        ramp = torch.linspace(-1, 1, len(wav))
        return self.options["dither"]["amount"] * ramp

    def save(self, path):
        """Write the settings."""
        path.write_text(str(vars(self)))
