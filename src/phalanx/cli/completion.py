"""Shell completion scripts, written out from the option table.

The scripts are complete in themselves: pressing Tab starts no Python. Only the dashed spelling is offered,
offering both would double every list. After the script's name files are completed, not options: what follows
belongs to the script.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli import COMMANDS
from phalanx.options import OPTIONS, SHELLS, Option, usage_error

_FIXED = {"nproc_per_node": ("auto", "gpu", "xpu", "cpu"), "rdzv_backend": ("phalanx", "static", "etcd")}


def main(argv: Sequence[str]) -> int:
    """`phalanx completion SHELL`."""
    if list(argv) in (["-h"], ["--help"]):
        print('usage: phalanx completion bash|zsh|fish\n\nbash:  eval "$(phalanx completion bash)"')
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        given = " ".join(argv) or "no shell"
        raise usage_error(f"{given}: name one shell, one of {', '.join(SHELLS)}")
    print(script(argv[0]), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for a shell."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _values(option: Option) -> tuple[str, ...]:
    return option.choices or _FIXED.get(option.dest, ())


def _names(option: Option) -> list[str]:
    return [flag for flag in option.flags if "_" not in flag]


def _bash() -> str:
    words = " ".join(option.name for option in OPTIONS)
    # For the walk to the script: which words take the next word as their value, in every spelling.
    taking = "|".join(flag for option in OPTIONS if option.kind != "flag" for flag in option.flags)
    cases = "".join(
        f'            {"|".join(option.flags)}) _phalanx_words "{" ".join(_values(option))}";;\n'
        for option in OPTIONS
        if _values(option)
    )
    return f"""\
# bash completion for phalanx; load it with: eval "$(phalanx completion bash)"
_phalanx_words() {{
    COMPREPLY=($(compgen -W "$1" -- "$word"))
}}
_phalanx() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" i=2
    COMPREPLY=()
    # bash takes --warm=off as three words; what follows the = is completed alone.
    [[ "$word" == "=" ]] && word=
    [[ "$before" == "=" ]] && before="${{COMP_WORDS[COMP_CWORD-2]}}"
    if [[ $COMP_CWORD -eq 1 ]]; then
        _phalanx_words "{" ".join(COMMANDS)} --help --version"
        return
    fi
    case "${{COMP_WORDS[1]}}" in
        run) ;;
        completion) _phalanx_words "{" ".join(SHELLS)}"; return;;
        help) _phalanx_words "{" ".join(COMMANDS)}"; return;;
        *) return;;
    esac
    while [[ $i -lt $COMP_CWORD ]]; do
        case "${{COMP_WORDS[i]}}" in
            {taking}) i=$((i + 1)); [[ "${{COMP_WORDS[i]}}" == "=" && $i -lt $COMP_CWORD ]] && i=$((i + 1));;
            --) i=$((i + 1)); break;;
            -*) ;;
            *) compopt -o default 2>/dev/null; return;;
        esac
        i=$((i + 1))
    done
    if [[ $i -gt $COMP_CWORD ]]; then
        case "$before" in
{cases}            *) compopt -o default 2>/dev/null;;
        esac
    elif [[ "$word" == -* ]]; then
        _phalanx_words "{words}"
    else
        compopt -o default 2>/dev/null
    fi
}}
complete -F _phalanx phalanx
"""


def _zsh() -> str:
    lines = []
    for option in OPTIONS:
        about = _quoted(option.help).replace("[", "(").replace("]", ")").replace(":", "\\:")
        values = _values(option)
        ends = f":{option.metavar}:({' '.join(values)})" if values else f":{option.metavar}:_files"
        ends = "" if option.kind == "flag" else ends.replace("HOST:PORT", "address")
        # With =, what a long option takes may follow it in the same word or in the next.
        lines += [
            f"        '{n}{'=' * (n[:2] == '--' and bool(ends))}[{about}]{ends}' \\" for n in _names(option)
        ]
    commands = " ".join(
        f"'{name}:{_quoted(about).replace(':', '')}'" for name, (_, about) in COMMANDS.items()
    )
    return f"""\
#compdef phalanx
# zsh completion for phalanx; save it as _phalanx in a directory of $fpath
_phalanx() {{
    local -a commands
    commands=({commands})
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    case "$words[2]" in
        completion) _values shell {" ".join(SHELLS)}; return;;
        help) _describe command commands; return;;
        run) ;;
        *) return;;
    esac
    shift words
    (( CURRENT -= 1 ))
    _arguments -S -A '-*' \\
{chr(10).join(lines)}
        '1:script:_files' '*::arguments:_files'
}}
if [[ "$funcstack[1]" == _phalanx ]]; then
    _phalanx "$@"
else
    compdef _phalanx phalanx
fi
"""


def _fish() -> str:
    taking = " ".join(flag for option in OPTIONS if option.kind != "flag" for flag in option.flags)
    lines = [
        "# fish completion for phalanx; load it with: phalanx completion fish | source",
        "function __phalanx_in --description 'whether this is the command'",
        "    set -l words (commandline -opc)",
        '    test (count $words) -gt 1; and test "$words[2]" = $argv[1]',
        "end",
        "function __phalanx_before_script --description 'whether options are still ours'",
        "    __phalanx_in run; or return 1",
        "    set -l words (commandline -opc)",
        "    set -e words[1..2]",
        "    set -l value no",
        "    for word in $words",
        "        if test $value = yes",
        "            set value no",
        f"        else if contains -- $word {taking}",
        "            set value yes",
        "        else if not string match -q -- '-*' $word; or test $word = --",
        "            return 1",
        "        end",
        "    end",
        "end",
    ]
    lines += [
        f"complete -c phalanx -f -n '{where}' -a {name} -d '{_quoted(about)}'"
        for name, (_, about) in COMMANDS.items()
        for where in ("__fish_use_subcommand", "__phalanx_in help")
    ]
    lines.append(f"complete -c phalanx -f -n '__phalanx_in completion' -a '{' '.join(SHELLS)}'")
    for option in OPTIONS:
        names = " ".join(f"-l {flag[2:]}" if len(flag) > 2 else f"-s {flag[1:]}" for flag in _names(option))
        values = _values(option)
        takes = "" if option.kind == "flag" else f" -x -a '{' '.join(values)}'" if values else " -r"
        about = _quoted(option.help)
        lines.append(f"complete -c phalanx -n __phalanx_before_script {names}{takes} -d '{about}'")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Text that is safe between single quotes in all three shells."""
    return text.replace("'", "’").replace("\\", "")
