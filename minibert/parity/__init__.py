"""Two models side by side, module by module: where they part first, and why."""

from minibert.parity.batches import SENTENCES as SENTENCES
from minibert.parity.comparing import compare as compare
from minibert.parity.points import Names as Names
from minibert.parity.report import Report as Report
