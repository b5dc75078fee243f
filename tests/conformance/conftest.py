"""Lets the suites of this folder import the matrix of cases that they share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
