# Run as a script in a fresh worker: loads bootstrap.py (through its cached bytecode) without leaving a
# module of ours in sys.modules or a directory of ours in sys.path, so that the user's program finds
# the interpreter as `python script.py` would have left it.
#
# The frame of this file is the only one of ours below the user's. Its name is chosen for the warnings
# module, which passes over frames that have both "importlib" and "_bootstrap" in their file name: a
# warning whose stacklevel points below the program is then reported as it is without us.
_name = "phalanx.zygote.bootstrap"
_path = __file__[: -len("_importlib_bootstrap.py")] + "bootstrap.py"
_globals = {"__name__": _name, "__file__": _path}
exec(type(__loader__)(_name, _path).get_code(_name), _globals)  # type: ignore[name-defined]
# No name of this module is left once start() has returned: it is the program's namespace from then on.
with _globals["Guard"]():  # type: ignore[operator]  # an annotation would be seen by the program
    _globals["start"]()()  # type: ignore[operator]
