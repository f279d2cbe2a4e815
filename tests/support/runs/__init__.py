"""Programs that tests start in processes of their own, most of them for several devices."""

from pathlib import Path

RUNS = Path(__file__).parent
