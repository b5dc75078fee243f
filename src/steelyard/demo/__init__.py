"""A small language model that ships with the package, and texts for it.

The model is a Llama of 2.6 million parameters, trained from scratch on the source text of Python's
standard library, which is on every machine that runs this package. So everything can be tried
without a download. `tools/train_demo_model.py` trains the model with the same split into training
and held-out files.
"""

from steelyard.demo.folder import model_folder
from steelyard.demo.texts import calibration_texts, held_out_texts

__all__ = ["calibration_texts", "held_out_texts", "model_folder"]
