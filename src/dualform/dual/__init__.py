"""The dual form: certificate, the model in dual form, and smaller equivalent systems."""

from dualform.dual.certificate import Certificate, CertificateRow, certify
from dualform.dual.compact import Compact, compact
from dualform.dual.model import dual_model, rebuilt_weights

__all__ = ["Certificate", "CertificateRow", "Compact", "certify", "compact", "dual_model", "rebuilt_weights"]
