"""Reports: records in, tables for a terminal and one self-contained web page out. This room reads and never measures.

``tables`` turns a record into plain sheets and prints them, ``plots`` draws figures, ``html`` puts both on one page.
"""
