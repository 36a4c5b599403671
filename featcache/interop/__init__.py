"""Other toolkits: what SpeechBrain, HuggingFace and lhotse need, one file a toolkit."""
