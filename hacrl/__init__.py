"""hacrl: train different language models together and share verified rollouts."""
