"""A small language model that ships with the package, and texts to try it on.

Everything can be tried without a download: the model is a Llama of 2.6 million parameters that
was trained from nothing on the text of Python's standard library, and that text is on every
machine that runs this package. `tools/train_demo_model.py` made the model; the split of the files
into training and held-out ones is the same here and there.
"""

from steelyard.demo.folder import model_folder
from steelyard.demo.texts import calibration_texts, held_out_texts

__all__ = ["calibration_texts", "held_out_texts", "model_folder"]
