from seriatim.consumer import Consumer as Consumer
from seriatim.consumer import RangeReader as RangeReader
from seriatim.consumer import Subscriber as Subscriber
from seriatim.producer import Producer as Producer
from seriatim.protocol.record import Record as Record

__all__ = ["Consumer", "Producer", "RangeReader", "Record", "Subscriber"]
__version__: str
