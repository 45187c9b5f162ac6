"""The bank of specialists beside the pure policies: what is installed, and how it meets a model.

bank      install, list and remove specialists; what is on disk and in which order
attach    route a model's layers through policies, and give the model back bit for bit
"""

from moelab.specialists.attach import Attachment, RoutedMlp, attach
from moelab.specialists.bank import GatedMlp, Specialist, SpecialistBank, state_digest

__all__ = ["Attachment", "GatedMlp", "RoutedMlp", "Specialist", "SpecialistBank", "attach", "state_digest"]
