"""Tell a user's mistake, which is reported in one line, from a bug, which keeps its traceback."""

import dis


def is_mistake(error: BaseException) -> bool:
    """Return whether an error is a user's and not a bug: of a file, a missing package, or raised by a check.

    A check is a raise statement of torchrope or of Lightning, which checks the options of its Trainer.
    """
    if isinstance(error, OSError):
        return True
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and not error.name.startswith("torchrope")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if not isinstance(error, ValueError) or trace is None:
        return False
    package = trace.tb_frame.f_globals["__name__"].partition(".")[0]
    raises = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raises and package in ("torchrope", "torchrope_lab", "pytorch_lightning", "lightning_fabric")
