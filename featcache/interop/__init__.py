"""Other toolkits: what SpeechBrain, HuggingFace, lhotse and Kaldi need, one file a toolkit."""
