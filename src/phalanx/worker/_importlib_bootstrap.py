# Run as a script in a fresh worker: loads bootstrap.py (through its cached bytecode) without adding a module
# to sys.modules or a directory to sys.path, so that the user's program finds the interpreter as
# `python script.py` leaves it.
#
# The frame of this file is the only launcher frame below the user's. Its name is chosen for the warnings
# module, which skips frames with both "importlib" and "_bootstrap" in their file name: a warning whose
# stacklevel points below the program is then reported as under plain Python.
_name = "phalanx.worker.bootstrap"
_path = __file__[: -len("_importlib_bootstrap.py")] + "bootstrap.py"
_globals = {"__name__": _name, "__file__": _path}
exec(type(__loader__)(_name, _path).get_code(_name), _globals)  # type: ignore[name-defined]
# start() clears this module's names: from then on it is the program's namespace.
with _globals["Guard"]():  # type: ignore[operator]  # an annotation would be visible to the program
    _globals["start"]()()  # type: ignore[operator]
