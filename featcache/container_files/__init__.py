"""Container files: durable, whole writes, and the digest of each page. For backends of anybody.

A format that keeps the arrays of each feature in files of their own needs no more than a
`FeatureFile` on top of a `PagedFile`, and a `FeatureFilesWriter` around these. Formats that another
library writes (HDF5) use `create`, `write_all` or `write_each`, `start_writing` after every
`AT_ONCE_BYTES`, `sync_file` and `sync_directory`. Writers that are
faster where they get many utterances at once have the method of `AppendsMany`. Backends that finish
the files of a dead writer where they lie use `open_left`, `end_file` and `remove_left`. Beside
them: `write_durably` for a small file that is there whole or not at all, and `WriterLock` for a
directory that one process may write to.
"""

from featcache.container_files.lock import WriterLock as WriterLock
from featcache.container_files.paged_file import AT_ONCE_BYTES as AT_ONCE_BYTES
from featcache.container_files.paged_file import PAGE_BYTES as PAGE_BYTES
from featcache.container_files.paged_file import AppendsMany as AppendsMany
from featcache.container_files.paged_file import EncodedArrays as EncodedArrays
from featcache.container_files.paged_file import Extents as Extents
from featcache.container_files.paged_file import FeatureFile as FeatureFile
from featcache.container_files.paged_file import FeatureFilesWriter as FeatureFilesWriter
from featcache.container_files.paged_file import PagedFile as PagedFile
from featcache.container_files.paged_file import Pages as Pages
from featcache.container_files.paged_file import Piece as Piece
from featcache.container_files.paged_file import append_alone as append_alone
from featcache.container_files.paged_file import append_many as append_many
from featcache.container_files.paged_file import cut as cut
from featcache.container_files.system import bytes_at as bytes_at
from featcache.container_files.system import create as create
from featcache.container_files.system import end_file as end_file
from featcache.container_files.system import misplaced as misplaced
from featcache.container_files.system import open_left as open_left
from featcache.container_files.system import read_at as read_at
from featcache.container_files.system import remove_left as remove_left
from featcache.container_files.system import start_writing as start_writing
from featcache.container_files.system import sync_directory as sync_directory
from featcache.container_files.system import sync_file as sync_file
from featcache.container_files.system import sync_together as sync_together
from featcache.container_files.system import write_all as write_all
from featcache.container_files.system import write_each as write_each
from featcache.container_files.whole_files import create_durably as create_durably
from featcache.container_files.whole_files import write_durably as write_durably
