"""The commands, each imported when it is called; cli.py lists them.

A module NAME.py has what `leanqkv NAME --help` shows and what can be refused without tensors: its imports, all at its
top, load neither torch nor transformers. The work is a function of another module, such as converting.py for
convert.py, whose imports are at its top as well; the command imports it with one line, when nothing is left to refuse.
"""
