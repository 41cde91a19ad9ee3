"""The commands, each imported when it is called; cli.py lists them.

A module NAME.py has what `leanqkv NAME --help` shows and what can be refused without tensors: its imports, all at its
top, load neither torch nor transformers. The help of an option is in the section Options of the docstring. The work is
a function of another module, such as eliminating.py for eliminate.py, whose imports are at its top as well; the command
imports it when nothing is left to refuse.
"""
