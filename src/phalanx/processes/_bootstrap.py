# Run as a script in a fresh worker: loads child.py (through its cached bytecode) without leaving a
# module of ours in sys.modules or a directory of ours in sys.path, so that the user's program finds
# the interpreter as `python script.py` would have left it.
_name = "phalanx.processes.child"
_path = __file__[: -len("_bootstrap.py")] + "child.py"
_globals = {"__name__": _name, "__file__": _path}
exec(type(__loader__)(_name, _path).get_code(_name), _globals)  # type: ignore[name-defined,attr-defined]
_globals["main"]()
