"""What the Brains of several recipes share."""

from .layers import LAYER_SCALES, mix


class FeatureBrain:
    """Scales hidden states."""

    layer_name = "middle"

    def scale_layers(self, hidden):
        """Scale the hidden states as their layer needs it."""
        scale = LAYER_SCALES[self.layer_name]
        return mix(hidden * scale, hidden.mean(dim=0), self.share)

    @property
    def share(self):
        """Share of the mean in the mixture."""
        return 0.2

    @staticmethod
    def unused_norm(hidden):
        """Normalise; no recipe uses it any more."""
        return hidden / hidden.norm()
