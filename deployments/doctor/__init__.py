"""``dflash-serve doctor``: looks at a machine, its software, models and cluster, and says what to do.

One module per subject; each returns findings and raises nothing. ``examine`` puts them in order.
"""

from deployments.doctor.examine import DoctorOptions, examine
from deployments.doctor.finding import Finding, Report

__all__ = ["DoctorOptions", "Finding", "Report", "examine"]
