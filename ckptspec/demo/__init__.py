"""The main job, end to end: a small ZeRO training run that is killed in the middle of a save and resumes byte-equal."""
