"""The last import of the process that workers are forked from: its objects leave the garbage collector.

A worker's collections then neither walk nor copy them. A run collects twice: 0.7 s each with all that is
imported, next to nothing without.
"""

import early

early.settle()
