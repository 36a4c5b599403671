"""The frozen encoder."""

import torch
from transformers import HubertModel, Wav2Vec2FeatureExtractor


class Weighted(torch.nn.Module):
    """Scales the waves for an encoder."""

    def __init__(self, model, loudness=0.8):
        super().__init__()
        self.model = model
        self.loudness = loudness

    def forward(self, values, **options):
        """Give the outputs of the encoder."""
        return self.model(torch.tanh(self.loudness * values), **options)


def load_encoder(folder):
    """Load the encoder and the extractor of its inputs."""
    model = HubertModel.from_pretrained(folder)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad = False
    extractor = Wav2Vec2FeatureExtractor.from_pretrained(folder)
    return Weighted(model), extractor
