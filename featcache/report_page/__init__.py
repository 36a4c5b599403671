"""The page of a report: facts of caches, charts of them, and one file of HTML that holds both."""

from featcache.report_page.facts import Finding, facts_of
from featcache.report_page.page import Report, write_page

__all__ = ["Finding", "Report", "facts_of", "write_page"]
